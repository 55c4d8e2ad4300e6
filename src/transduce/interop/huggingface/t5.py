"""T5, mT5, UMT5, ByT5, FLAN-T5 and Switch: RMS pre-norm, no biases, unscaled dot products, relative position bias.

T5 and mT5 have one bias for all layers, UMT5 one for each layer. The encoder of LongT5 has a window. Some layers of
Switch Transformers are mixtures of experts. There the library drops tokens beyond `expert_capacity` for one expert and
text, but not where it generates token by token; here none are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from transduce.contracts import Family
from transduce.errors import InputError
from transduce.interop.huggingface.family import (
    ACTIVATIONS,
    NORM_EPS,
    Config,
    Content,
    Names,
    TensorMap,
    WeightMap,
    Weights,
    hf_activation,
)
from transduce.recipe import Recipe

OUTPUT = "lm_head.weight"
ATTENTIONS = {  # sublayers of a block by their index
    "encoder": (("0.SelfAttention", "self_attention"),),
    "decoder": (("0.SelfAttention", "self_attention"), ("1.EncDecAttention", "cross_attention")),
}
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
NORMS = {  # by the index of the sublayer that they precede
    "encoder": ("self_attention_norm", "feed_forward_norm"),
    "decoder": ("self_attention_norm", "cross_attention_norm", "feed_forward_norm"),
}
FEED_FORWARD = {  # gated or not
    True: {"wi_0": "fc1", "wi_1": "fc_gate", "wo": "fc2"},
    False: {"wi": "fc1", "wo": "fc2"},
}


LOCAL = "encoder.block.*.layer.0.SelfAttention", "encoder.block.*.layer.0.LocalSelfAttention"
POSITION = "position.relative_attention_bias"
LAYER_POSITION = "position.layers.*.relative_attention_bias"  # of UMT5


def _modules(gated: bool, position: str) -> dict[str, str]:
    table: dict[str, str] = {}
    for side, attentions in ATTENTIONS.items():
        block, last = f"{side}.block.*.layer", len(attentions)
        for hf, native in attentions:
            table |= {f"{block}.{hf}.{a}": f"{side}.layers.*.{native}.{b}" for a, b in PROJECTIONS.items()}
        feed = f"{block}.{last}.DenseReluDense"
        table |= {f"{feed}.{a}": f"{side}.layers.*.feed_forward.{b}" for a, b in FEED_FORWARD[gated].items()}
        table |= {f"{block}.{part}.layer_norm": f"{side}.layers.*.{norm}" for part, norm in enumerate(NORMS[side])}
        table[f"{side}.final_layer_norm"] = f"{side}.final_norm"
        table[f"{block}.0.SelfAttention.relative_attention_bias"] = f"{side}.{position}"
    return table


EMBEDDINGS = ("encoder.embedding.weight", "decoder.embedding.weight")
ALL_TABLES = (*EMBEDDINGS, "decoder.output.projection.weight")
TIED_EMBEDDINGS = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
}
# In the files of the first T5 models, but T5 itself does not use it.
IGNORED = ("decoder.block.*.layer.1.EncDecAttention.relative_attention_bias.weight",)


def _scales_output(config: Config) -> bool:
    """Whether decoder states are divided by sqrt(d_model) before the output layer.

    Up to version 4 of the transformers library all three families do so where tie_word_embeddings is set. Version 5
    always sets it, and T5 has an option of its own; there mT5 never divides, and UMT5 always does.
    """
    tied = config.flag("tie_word_embeddings", True)
    if config.content.get("model_type") == "mt5":
        return config.flag("tie_word_embeddings") and _major_version(config) < 5
    return config.flag("scale_decoder_outputs", tied)


def _major_version(config: Config) -> int:
    """Of the transformers library that wrote the file; without one, the present version."""
    major = str(config.content.get("transformers_version") or "").partition(".")[0]
    return int(major) if major.isdecimal() else 5


def _feed_forward(config: Config) -> str:
    """The activation, with `gated-` before it where there is a gate."""
    if config.content.get("model_type") == "switch_transformers":
        return str(config.content.get("dense_act_fn") or "relu")
    default = "relu" if config.content.get("model_type", "t5") in ("t5", "longt5") else "gated-gelu"
    return str(config.content.get("feed_forward_proj") or default)


def _experts(config: Config, side: str, layers: int) -> Content:
    """Layers of experts, by their number on one side of a Switch Transformer."""
    if config.content.get("model_type") != "switch_transformers":
        return {}
    sparse = config.integer(f"num_sparse_{side}_layers", 0)
    every = layers // sparse if sparse else layers
    if every == 0:
        return {}
    return {
        "experts": config.count("num_experts", 8),
        "experts_every": every,
        "experts_first": 0 if every == 1 else 1,
    }


def expert_modules(config: Config, modules: Mapping[str, str], experts: str = "experts.expert_{}") -> dict[str, str]:
    """The modules of every expert, and of the router, from those of a feed-forward network."""
    table = {}
    for hf, native in modules.items():
        (foreign, leaf), (network, own) = hf.rsplit(".", 1), native.rsplit(".", 1)
        for number in range(config.count("num_experts", 8)):
            table[f"{foreign}.{experts.format(number)}.{leaf}"] = f"{network}.experts.{number}.{own}"
        table[f"{foreign}.router.classifier"] = f"{network}.router"
    return table


def zero_router_biases(weights: Weights) -> Weights:
    """Routers without a bias get zeros."""
    for name in [name for name in weights if name.endswith(".router.weight")]:
        weights.setdefault(name.replace("weight", "bias"), torch.zeros_like(weights[name][:, 0]))
    return weights


def stack(config: Config, layers: int) -> Content:
    feed_forward = _feed_forward(config)
    gated, _, name = feed_forward.rpartition("-")
    name = "gelu_new" if feed_forward == "gated-gelu" else name  # T5 means the tanh approximation here
    if gated not in ("", "gated") or name not in ACTIVATIONS:
        raise InputError(
            f"feed_forward_proj: {feed_forward!r} is not supported",
            where=config.where,
            remedy="supported: relu, gelu, gated-gelu, gated-silu",
        )
    return {
        "kind": "transformer",
        "layers": layers,
        "width": config.count("d_model"),
        "heads": config.count("num_heads"),
        "head_width": config.count("d_kv"),
        "ff_width": config.count("d_ff"),
        "activation": ACTIVATIONS[name],
        "gated": gated == "gated",
        "norm_kind": "rms",
        "norm_eps": config.rate("layer_norm_epsilon", 1e-6),
        "bias": False,
        "score": "dot",
        "position": {
            "kind": "relative",
            "buckets": config.count("relative_attention_num_buckets", 32),
            "max_distance": config.count("relative_attention_max_distance", 128),
        },
        "position_per_layer": config.content.get("model_type") == "umt5",
        "dropout": config.rate("dropout_rate"),
        "attention_dropout": config.rate("dropout_rate"),
        "activation_dropout": config.rate("dropout_rate"),
    }


def _to_recipe(config: Config, names: Collection[str]) -> Content:
    layers = config.count("num_layers")
    target_layers, window = config.count("num_decoder_layers", layers), {}
    if config.content.get("model_type") == "longt5":
        config.require("encoder_attention_type", "local")
        window = {"window": config.count("local_radius", 127)}
    return {
        "encoder": {**stack(config, layers), **_experts(config, "encoder", layers), **window},
        "decoder": {**stack(config, target_layers), **_experts(config, "decoder", target_layers)},
        "tie": "none" if OUTPUT in names else "all",
        # T5 divides by sqrt(d_model) before a tied output; here the tied table is divided once, on import, and
        # embeddings are multiplied by sqrt(d_model) when they are read.
        "scale_embedding": OUTPUT not in names and _scales_output(config),
    }


def _config(model_type: str) -> Callable[[Recipe, int | None], Content | None]:
    def write(recipe: Recipe, pad_id: int | None) -> Content | None:
        encoder, decoder = recipe.model.encoder, recipe.model.decoder
        if encoder is None or decoder is None:
            return None
        tied = recipe.model.tie != "none"
        activation = hf_activation(encoder)
        if encoder["gated"]:
            activation = "gated-gelu" if encoder["activation"] == "gelu_tanh" else f"gated-{activation}"
        return {
            "model_type": model_type,
            "d_model": encoder["width"],
            "d_kv": encoder["head_width"] or encoder["width"] // encoder["heads"],
            "d_ff": encoder["ff_width"],
            "num_heads": encoder["heads"],
            "num_layers": encoder["layers"],
            "num_decoder_layers": decoder["layers"],
            "feed_forward_proj": activation,
            "layer_norm_epsilon": encoder["norm_eps"] or NORM_EPS["rms"],
            "relative_attention_num_buckets": encoder["position"].get("buckets", 32),
            "relative_attention_max_distance": encoder["position"].get("max_distance", 128),
            "dropout_rate": encoder["dropout"],
            "tie_word_embeddings": tied,
            "scale_decoder_outputs": tied and recipe.model.scale_embedding,
            "is_encoder_decoder": True,
        }

    return write


def divide_by(root: float) -> tuple[Callable[[Tensor], list[Tensor]], Callable[[list[Tensor]], Tensor]]:
    """Division by sqrt(d_model) and its exact inverse: of the neighbouring floats the one that divides to the input."""

    def invert(native: list[Tensor]) -> Tensor:
        product = rounded = native[0] * root
        for sign in (1, -1):
            neighbour = torch.nextafter(rounded, rounded + sign * rounded.abs())
            product = torch.where((neighbour / root == native[0]) & (product / root != native[0]), neighbour, product)
        return product

    return lambda weight: [weight / root], invert


def _weight_map(config: Config, names: Collection[str]) -> WeightMap:
    """Output and embedding are one matrix or two, and the output is scaled or not: one table, four cases."""
    position = LAYER_POSITION if config.content.get("model_type") == "umt5" else POSITION
    modules = _modules(_feed_forward(config).startswith("gated"), position)
    if config.content.get("model_type") == "longt5":
        modules = {name.replace(*LOCAL): native for name, native in modules.items()}
    combine: Callable[[Weights], Weights] = dict
    if config.content.get("model_type") == "switch_transformers":
        modules = {name.replace("DenseReluDense", "mlp"): native for name, native in modules.items()}
        dense = {name: native for name, native in modules.items() if ".mlp." in name}
        modules, combine = {**modules, **expert_modules(config, dense)}, zero_router_biases
    scaling = divide_by(config.count("d_model") ** 0.5) if _scales_output(config) else ()
    tensors = {"shared.weight": TensorMap(ALL_TABLES, *scaling)}
    if OUTPUT in names:
        output = TensorMap(("decoder.output.projection.weight",), *scaling)
        tensors = {"shared.weight": TensorMap(EMBEDDINGS), OUTPUT: output}
    return WeightMap(modules, tensors, TIED_EMBEDDINGS, IGNORED, combine=combine)


def _required_names(config: Mapping[str, Any]) -> Names:
    return () if config.get("tie_word_embeddings", True) else (OUTPUT,)


FAMILIES = {
    "T5ForConditionalGeneration": Family(_to_recipe, _weight_map, _config("t5"), required_names=_required_names),
    "MT5ForConditionalGeneration": Family(_to_recipe, _weight_map),
    "UMT5ForConditionalGeneration": Family(_to_recipe, _weight_map, _config("umt5"), required_names=_required_names),
    "LongT5ForConditionalGeneration": Family(_to_recipe, _weight_map),
    "SwitchTransformersForConditionalGeneration": Family(_to_recipe, _weight_map),
}
