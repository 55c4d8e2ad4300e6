"""Moonshine: convolutions over a waveform, then a Transformer with rotary positions and a gated decoder.

Rotary positions rotate pairs of neighbours there and pairs of halves here: queries and keys are stored in the order of
the halves. Layers and norms without a bias have zeros here.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from transduce.contracts import Family
from transduce.interop.huggingface.family import Config, Content, TensorMap, WeightMap, Weights
from transduce.interop.huggingface.llama import rotary, zero_biases
from transduce.interop.huggingface.wav2vec2 import read_waveform_source

PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out_proj"}
SELF = {f"self_attn.{hf}": f"self_attention.{native}" for hf, native in PROJECTIONS.items()}
CROSS = {f"encoder_attn.{hf}": f"cross_attention.{native}" for hf, native in PROJECTIONS.items()}
ENCODER = {
    **SELF,
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.fc1": "feed_forward.fc1",
    "mlp.fc2": "feed_forward.fc2",
}
DECODER = {
    **SELF,
    **CROSS,
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "cross_attention_norm",
    "final_layernorm": "feed_forward_norm",
    "mlp.fc2": "feed_forward.fc2",
}
MODULES = {
    **{f"model.encoder.conv{number + 1}": f"encoder.embedding.convs.{number}" for number in range(3)},
    "model.encoder.groupnorm": "encoder.embedding.norm",
    **{f"model.encoder.layers.*.{hf}": f"encoder.layers.*.{native}" for hf, native in ENCODER.items()},
    "model.encoder.layer_norm": "encoder.final_norm",
    **{f"model.decoder.layers.*.{hf}": f"decoder.layers.*.{native}" for hf, native in DECODER.items()},
    "model.decoder.norm": "decoder.final_norm",
}


def _halves(joint: Tensor) -> list[Tensor]:
    return list(joint.chunk(2))


TENSORS = {
    # f(gate) * values: the activation is that of fc1 here.
    **{
        f"model.decoder.layers.*.mlp.fc1.{leaf}": TensorMap(
            (f"decoder.layers.*.feed_forward.fc_gate.{leaf}", f"decoder.layers.*.feed_forward.fc1.{leaf}"), _halves
        )
        for leaf in ("weight", "bias")
    },
    "model.decoder.embed_tokens.weight": TensorMap(("decoder.embedding.weight", "decoder.output.projection.weight")),
}
ROTATED = (".self_attention.q_proj.", ".self_attention.k_proj.")


def _rotated_share(config: Config) -> float:
    """Version 5 of the library has a section for it, version 4 a key."""
    content = {**config.content, **config.section("rope_parameters")}
    return Config(content, config.where).number("partial_rotary_factor", 0.0, 1.0) or 0.9


def _weights(config: Config, names: Collection[str]) -> WeightMap:
    heads = config.count("decoder_num_attention_heads", 8)
    rotated = int(config.count("hidden_size") // heads * _rotated_share(config))

    def by_halves(tensor: Tensor) -> Tensor:
        """H*K ... -> H*K ...: of each head the even places of the rotated part, then the odd ones, then the rest."""
        parts = tensor.unflatten(0, (heads, -1))
        ends = (parts[:, :rotated:2], parts[:, 1:rotated:2], parts[:, rotated:])
        return torch.cat(ends, 1).flatten(0, 1)

    def combine(weights: Weights) -> Weights:
        for name in [name for name in weights if any(part in name for part in ROTATED)]:
            weights[name] = by_halves(weights[name])
        for name in [name for name in weights if name.endswith("_norm.weight")]:
            weights.setdefault(name.replace(".weight", ".bias"), torch.zeros_like(weights[name]))
        return zero_biases(weights)

    tied = {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    return WeightMap(MODULES, TENSORS, tied, combine=combine)


def _stack(config: Config, side: str, activation: str) -> Content:
    return {
        "kind": "transformer",
        "layers": config.count(f"{side}_num_hidden_layers", 6),
        "width": config.count("hidden_size"),
        "heads": config.count(f"{side}_num_attention_heads", 8),
        "ff_width": config.count("intermediate_size"),
        "activation": config.activation(f"{side}_hidden_act", activation),
        "gated": side == "decoder",
        "norm": "pre",
        "position": rotary(config, _rotated_share(config)),
        "dropout": 0.0,
        "attention_dropout": config.rate("attention_dropout"),
    }


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    config.require("tie_word_embeddings", True)
    heads = config.count("decoder_num_attention_heads", 8)
    for name in ("encoder_num_attention_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"):
        config.require(name, heads)  # the library needs it too
    return {
        "encoder": {**_stack(config, "encoder", "gelu"), "front": {"kind": "waveform_stem"}},
        "decoder": _stack(config, "decoder", "silu"),
        "tie": "target",
        "scale_embedding": False,
    }


FAMILIES = {
    "MoonshineForConditionalGeneration": Family(
        _to_recipe, _weights, read_sources=read_waveform_source, modality="audio"
    )
}
