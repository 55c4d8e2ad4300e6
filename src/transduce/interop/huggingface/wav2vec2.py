"""wav2vec 2.0 and HuBERT with a CTC head: convolutions over a waveform, then a Transformer encoder.

The positional convolution is stored with weight norm, g v / |v|, and is one weight here. Older files write g and v as
weight_g and weight_v.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from transduce.contracts import Family
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.folder import read_json

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
SECONDS = 60.0  # the longest recording; there are no positions that end
LAYER = {
    "layer_norm": "self_attention_norm",
    **{f"attention.{name}": f"self_attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")},
    "final_layer_norm": "feed_forward_norm",
    "feed_forward.intermediate_dense": "feed_forward.fc1",
    "feed_forward.output_dense": "feed_forward.fc2",
}
CONV_NORMS = {"group": "first", "layer": "all"}  # group norm has one group per channel
POSITION = "encoder.pos_conv_embed.conv"
MAGNITUDE, DIRECTION, POSITION_WEIGHT = "magnitude", "direction", "encoder.embedding.position.conv.weight"
MODULES = {
    "feature_extractor.conv_layers.*.conv": "encoder.embedding.convs.*",
    "feature_extractor.conv_layers.*.layer_norm": "encoder.embedding.conv_norms.*",
    "feature_projection.layer_norm": "encoder.embedding.projection_norm",
    "feature_projection.projection": "encoder.embedding.projection",
    **{f"encoder.layers.*.{hf}": f"encoder.layers.*.{native}" for hf, native in LAYER.items()},
    "lm_head": "head.layers.1",
}
TENSORS = {
    f"{POSITION}.bias": TensorMap((POSITION_WEIGHT.replace("weight", "bias"),)),
    **{f"{POSITION}.{name}": TensorMap((MAGNITUDE,)) for name in ("weight_g", "parametrizations.weight.original0")},
    **{f"{POSITION}.{name}": TensorMap((DIRECTION,)) for name in ("weight_v", "parametrizations.weight.original1")},
}


def _combine(weights: Weights) -> Weights:
    """Weight norm (Salimans & Kingma 2016), for each place of the kernel: 1 1 K and D D/G K -> D D/G K."""
    if MAGNITUDE in weights and DIRECTION in weights:
        magnitude, direction = weights.pop(MAGNITUDE), weights.pop(DIRECTION)
        norm: Tensor = direction.norm(dim=(0, 1), keepdim=True)
        weights[POSITION_WEIGHT] = direction * (magnitude / norm)
    return weights


def _weights(prefix: str) -> Callable[[Config, Collection[str]], WeightMap]:
    def weight_map(config: Config, names: Collection[str]) -> WeightMap:
        """The norm of the encoder is the last one, or stands before the layers."""
        norm = "final_norm" if config.flag("do_stable_layer_norm") else "embedding_norm"
        modules = {**MODULES, "encoder.layer_norm": f"encoder.{norm}"}
        return WeightMap(modules, TENSORS, ignored=("masked_spec_embed",), combine=_combine, prefix=prefix)

    return weight_map


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    config.require("add_adapter", False)
    config.require("adapter_attn_dim", None)
    config.require("conv_pos_batch_norm", False)
    stable = config.flag("do_stable_layer_norm")
    encoder = {
        "kind": "transformer",
        "layers": config.count("num_hidden_layers"),
        "width": config.count("hidden_size"),
        "heads": config.count("num_attention_heads"),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation("hidden_act", "gelu"),
        "norm": "pre" if stable else "post",
        "norm_eps": config.rate("layer_norm_eps", 1e-5),
        "embedding_norm": not stable,
        "position": "none",
        "dropout": config.rate("hidden_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
        "activation_dropout": config.rate("activation_dropout"),
        "front": _front(config),
    }
    return {"encoder": encoder, "head": {"kind": "ctc", "dropout": config.rate("final_dropout")}}


def _front(config: Config) -> Content:
    norm = config.content.get("feat_extract_norm", "group")
    if norm not in CONV_NORMS:
        raise config.wrong("feat_extract_norm", norm, "cannot be imported", f"supported: {', '.join(CONV_NORMS)}")
    return {
        "kind": "waveform_convolution",
        "conv_widths": config.counts("conv_dim", (512,) * 7),
        "kernels": config.counts("conv_kernel", (10, 3, 3, 3, 3, 2, 2)),
        "strides": config.counts("conv_stride", (5, 2, 2, 2, 2, 2, 2)),
        "conv_norm": CONV_NORMS[norm],
        "conv_bias": config.flag("conv_bias"),
        "activation": config.activation("feat_extract_activation", "gelu"),
        "projection_norm": config.flag("feat_proj_layer_norm", True),
        "norm_eps": config.rate("layer_norm_eps", 1e-5),
        "position_kernel": config.count("num_conv_pos_embeddings", 128),
        "position_groups": config.count("num_conv_pos_embedding_groups", 16),
        "dropout": config.rate("feat_proj_dropout"),
    }


def read_waveform_source(folder: Path, config: Config) -> Content:
    """data.sources: the waveform as Wav2Vec2FeatureExtractor reads it."""
    processor = Config(read_json(folder, PROCESSOR), str(folder / PROCESSOR))
    content = read_json(folder, PREPROCESSOR) or processor.section("feature_extractor")
    extractor = Config(content, str(folder / PREPROCESSOR))
    extractor.require("feature_size", 1)
    rate, normalise = extractor.count("sampling_rate", 16_000), extractor.flag("do_normalize", True)
    return {"sound": {"kind": "waveform", "rate": rate, "seconds": SECONDS, "normalise": normalise}}


FAMILIES = {
    f"{name}ForCTC": Family(
        _to_recipe,
        _weights(f"{name.lower()}."),
        read_sources=read_waveform_source,
        modality="audio",
        start_token="",
        label_kind="paths",
    )
    for name in ("Wav2Vec2", "Hubert")
}
