"""GIT: the Vision Transformer of CLIP, and a BERT decoder whose self-attention reads the image as a prefix.

CLIP has x sigmoid(1.702 x) between the layers of a feed-forward network, which is silu(1.702 x) / 1.702: the factors
are multiplied into the layers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transduce.contracts import Family
from transduce.errors import InputError
from transduce.interop.huggingface import bert, vit
from transduce.interop.huggingface.blip import LAYER as CLIP_LAYER
from transduce.interop.huggingface.blip import VISION
from transduce.interop.huggingface.family import NORM_EPS, Config, Content, TensorMap, WeightMap, Weights

IMAGES, TEXTS, PROJECTION = "git.image_encoder.vision_model", "git", "git.visual_projection.visual_projection"
QUICK_GELU, SLOPE = "quick_gelu", 1.702
VISION_LAYER = {
    **{hf: native for hf, native in CLIP_LAYER.items() if not hf.startswith("self_attn.")},
    **{f"self_attn.{name}": f"self_attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")},
}
MODULES = {
    f"{IMAGES}.embeddings.patch_embedding": "encoder.embedding.projection",
    f"{IMAGES}.pre_layrnorm": "encoder.embedding_norm",
    **{f"{IMAGES}.encoder.layers.*.{hf}": f"encoder.layers.*.{native}" for hf, native in VISION_LAYER.items()},
    f"{IMAGES}.post_layernorm": "encoder.final_norm",
    f"{PROJECTION}.*": "projection.*",
    f"{TEXTS}.embeddings.LayerNorm": "decoder.embedding_norm",
    f"{TEXTS}.embeddings.position_embeddings": "decoder.position.embed_positions",
    **{f"{TEXTS}.encoder.layer.*.{hf}": f"decoder.layers.*.{native}" for hf, native in bert.LAYER.items()},
    f"{TEXTS}.encoder.layer.*.output.LayerNorm": "decoder.layers.*.feed_forward_norm",
}
EMBEDDING, OUTPUT = f"{TEXTS}.embeddings.word_embeddings.weight", "output.weight"
TABLES = ("decoder.embedding.weight", "decoder.output.projection.weight", "decoder.output.projection.bias")
PROJECTION_LAYERS = {"projection.0.": "decoder.memory_proj.", "projection.1.": "decoder.memory_norm."}
DEFAULTS = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
VISION_DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": QUICK_GELU, "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.0,
}  # fmt: skip


def _flatten(config: Config) -> Config:
    if not isinstance(config.content.get(VISION), dict):
        raise InputError(f"config.json has no {VISION}", where=config.where, remedy="fetch the folder again")
    return Config({**DEFAULTS, **config.content}, config.where)


def _vision(config: Config) -> Config:
    """With the names that ViT has for the same values."""
    content = {**VISION_DEFAULTS, **config.section(VISION)}
    content["attention_probs_dropout_prob"] = content.get("attention_dropout", 0.0)
    return Config(content, f"{config.where}: {VISION}")


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    config.require("num_image_with_embedding", None)
    vision = _vision(config)
    activation = "silu" if vision.content["hidden_act"] == QUICK_GELU else vision.content["hidden_act"]
    encoder = vit.to_recipe(Config({**vision.content, "hidden_act": activation}, vision.where), ())["encoder"]
    return {
        "encoder": {**encoder, "embedding_norm": True},
        "decoder": {**bert.ENCODERS["Bert"](config), "kind": "prefix"},
        "tie": "none" if OUTPUT in names else "target",
        "scale_embedding": False,
    }


def _weight_map(config: Config, names: Collection[str]) -> WeightMap:
    vision = _vision(config)
    slope = SLOPE if vision.content["hidden_act"] == QUICK_GELU else 1.0
    # A norm of x with e beside the variance is a norm of c x with c^2 e.
    factor = (NORM_EPS["layer"] / vision.rate("layer_norm_eps", NORM_EPS["layer"])) ** 0.5

    def combine(weights: Weights) -> Weights:
        weights = vit.combine_tokens(weights)
        for hf, native in PROJECTION_LAYERS.items():
            weights |= {native + leaf: weights.pop(hf + leaf) for leaf in ("weight", "bias") if hf + leaf in weights}
        patches = weights.get("encoder.embedding.projection.weight")
        if patches is not None:
            weights.setdefault("encoder.embedding.projection.bias", patches.new_zeros(len(patches)))
        factors = {name: _factor(name, slope, factor) for name in weights}
        return {name: tensor * factors[name] if factors[name] != 1 else tensor for name, tensor in weights.items()}

    tensors = {
        f"{IMAGES}.embeddings.class_embedding": TensorMap((vit.CLS,), lambda row: [row[None, None]]),
        f"{IMAGES}.embeddings.position_embedding.weight": TensorMap((vit.POSITION_TABLE,), lambda table: [table[None]]),
        EMBEDDING: TensorMap(TABLES[:1] if OUTPUT in names else TABLES[:2]),
        "output.bias": TensorMap(TABLES[2:]),
        **({OUTPUT: TensorMap(TABLES[1:2])} if OUTPUT in names else {}),
    }
    ignored = (f"{IMAGES}.embeddings.position_ids", f"{TEXTS}.embeddings.position_ids")
    return WeightMap(MODULES, tensors, ignored=ignored, combine=combine)


def _factor(name: str, slope: float, norm: float) -> float:
    if name.startswith("decoder.memory_proj."):
        return norm
    if name.startswith("encoder.") and ".feed_forward.fc1." in name:
        return slope
    return 1 / slope if name.startswith("encoder.") and name.endswith(".feed_forward.fc2.weight") else 1.0


def _read_sources(folder: Path, config: Config) -> Content:
    return vit.read_preprocessing(folder, _vision(config))


FAMILIES = {
    "GitForCausalLM": Family(
        _to_recipe,
        _weight_map,
        flatten=_flatten,
        read_sources=_read_sources,
        modality="image",
        start_token="bos_token_id",
        start_replaces_first=True,
        start_is_output=True,
    )
}
