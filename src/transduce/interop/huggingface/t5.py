"""T5, mT5 and FLAN-T5: RMS norm before, no biases, unscaled dot products, one relative bias for all layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface.family import ACTIVATIONS, Family, Place, Settings

OUTPUT = "lm_head.weight"
SIDES = {  # which of a block's parts is which, by its number there
    "encoder": (("0.SelfAttention", "own.attention"),),
    "decoder": (("0.SelfAttention", "own.attention"), ("1.EncDecAttention", "cross")),
}
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output"}
FEED = {  # gated or not
    True: {"wi_0": "grow", "wi_1": "gate", "wo": "shrink"},
    False: {"wi": "grow", "wo": "shrink"},
}


def _table(gated: bool) -> dict[str, str]:
    table: dict[str, str] = {}
    for side, attentions in SIDES.items():
        block, last = f"{side}.block.*.layer", len(attentions)
        for theirs, ours in attentions:
            table |= {f"{block}.{theirs}.{a}": f"{side}.blocks.*.{ours}.{b}" for a, b in PROJECTIONS.items()}
        feed = f"{block}.{last}.DenseReluDense"
        table |= {f"{feed}.{a}": f"{side}.blocks.*.feed_forward.{b}" for a, b in FEED[gated].items()}
        table |= {f"{block}.{part}.layer_norm": f"{side}.blocks.*.residuals.{part}.norm" for part in range(last + 1)}
        table[f"{side}.final_layer_norm"] = f"{side}.norm"
        table[f"{block}.0.SelfAttention.relative_attention_bias"] = f"{side}.position.table"
    return table


EMBEDDINGS = ("encoder.embedding.table.weight", "decoder.embedding.table.weight")
TIED = (*EMBEDDINGS, "decoder.output.layer.weight")
COPIES = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
}
ASIDE = ("decoder.block.*.layer.1.EncDecAttention.relative_attention_bias.weight",)  # never read, by T5 neither


def _scaled_output(settings: Settings) -> bool:
    """Whether rows are divided by the root of the width before the output layer."""
    return settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))


def _part(settings: Settings, layers: int) -> dict[str, Any]:
    feed = str(settings.content.get("feed_forward_proj") or "relu")
    gated, _, name = feed.rpartition("-")
    name = "gelu_new" if feed == "gated-gelu" else name  # what T5 calls gelu there is its approximation
    if gated not in ("", "gated") or name not in ACTIVATIONS:
        remedy = "known: relu, gelu, gated-gelu, gated-silu"
        raise InputError(f"feed_forward_proj: there is no {feed!r} here", where=settings.where, remedy=remedy)
    return {
        "kind": "transformer",
        "layers": layers,
        "width": settings.count("d_model"),
        "heads": settings.count("num_heads"),
        "head_width": settings.count("d_kv"),
        "ff_width": settings.count("d_ff"),
        "activation": ACTIVATIONS[name],
        "gated": gated == "gated",
        "norm_kind": "rms",
        "norm_eps": settings.rate("layer_norm_epsilon", 1e-6),
        "bias": False,
        "score": "dot",
        "position": {
            "kind": "relative",
            "buckets": settings.count("relative_attention_num_buckets", 32),
            "distance": settings.count("relative_attention_max_distance", 128),
        },
        "dropout": settings.rate("dropout_rate"),
        "attention_dropout": settings.rate("dropout_rate"),
        "activation_dropout": settings.rate("dropout_rate"),
    }


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    layers = settings.count("num_layers")
    return {
        "encoder": _part(settings, layers),
        "decoder": _part(settings, settings.count("num_decoder_layers", layers)),
        "tie": "none" if OUTPUT in names else "all",
        # Tied weights that are divided by the root of the width on their way out are ours, scaled up on reading.
        "scale_embedding": OUTPUT not in names and _scaled_output(settings),
    }


def _divided(root: float) -> tuple[Callable[[Tensor], list[Tensor]], Callable[[list[Tensor]], Tensor]]:
    """By the root of the width, and back: of the numbers next to each other the one that gives ours, where one does."""

    def back(made: list[Tensor]) -> Tensor:
        near = made[0] * root
        ways = (near, *(torch.nextafter(near, near + sign * near.abs()) for sign in (1, -1)))
        for other in ways[1:]:
            near = torch.where((other / root == made[0]) & (near / root != made[0]), other, near)
        return near

    return lambda weight: [weight / root], back


def family(settings: Settings, names: Collection[str]) -> Family:
    """Output and embedding are one matrix or two, and the output is scaled or not: four ways, one table."""
    table = _table(str(settings.content.get("feed_forward_proj")).startswith("gated"))
    change = _divided(settings.count("d_model") ** 0.5) if _scaled_output(settings) else ()
    if OUTPUT in names:
        output = Place(("decoder.output.layer.weight",), *change)
        return Family(_model, table, {"shared.weight": Place(EMBEDDINGS), OUTPUT: output}, COPIES, ASIDE)
    return Family(_model, table, {"shared.weight": Place(TIED, *change)}, COPIES, ASIDE)


ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
