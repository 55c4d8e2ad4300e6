"""T5, mT5 and FLAN-T5: RMS norm before, no biases, unscaled dot products, one relative bias for all layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transduce.errors import InputError
from transduce.interop.family import ACTIVATIONS, Family, Place, Settings

OUTPUT = "lm_head.weight"
SIDES = {  # which of a block's parts is which, by its number there
    "encoder": (("0.SelfAttention", "own.attention"),),
    "decoder": (("0.SelfAttention", "own.attention"), ("1.EncDecAttention", "cross")),
}
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output"}
FEED = {"wi": "grow", "wi_0": "grow", "wi_1": "gate", "wo": "shrink"}


def _table() -> dict[str, str]:
    table: dict[str, str] = {}
    for side, attentions in SIDES.items():
        block, last = f"{side}.block.*.layer", len(attentions)
        for theirs, ours in attentions:
            table |= {f"{block}.{theirs}.{a}": f"{side}.blocks.*.{ours}.{b}" for a, b in PROJECTIONS.items()}
        table |= {f"{block}.{last}.DenseReluDense.{a}": f"{side}.blocks.*.feed_forward.{b}" for a, b in FEED.items()}
        table |= {f"{block}.{part}.layer_norm": f"{side}.blocks.*.residuals.{part}.norm" for part in range(last + 1)}
        table[f"{side}.final_layer_norm"] = f"{side}.norm"
        table[f"{block}.0.SelfAttention.relative_attention_bias"] = f"{side}.position.table"
    return table


TABLE = _table()
EMBEDDINGS = ("encoder.embedding.table.weight", "decoder.embedding.table.weight")
TIED = Place((*EMBEDDINGS, "decoder.output.layer.weight"))
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
        "hidden": settings.count("d_ff"),
        "activation": ACTIVATIONS[name],
        "gated": gated == "gated",
        "normalisation": "rms",
        "epsilon": settings.rate("layer_norm_epsilon", 1e-6),
        "bias": False,
        "score": "dot",
        "position": {
            "kind": "relative",
            "buckets": settings.count("relative_attention_num_buckets", 32),
            "distance": settings.count("relative_attention_max_distance", 128),
        },
        "dropout": settings.rate("dropout_rate"),
        "attention_dropout": settings.rate("dropout_rate"),
        "hidden_dropout": settings.rate("dropout_rate"),
    }


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    layers = settings.count("num_layers")
    return {
        "encoder": _part(settings, layers),
        "decoder": _part(settings, settings.count("num_decoder_layers", layers)),
        "tie": "none" if OUTPUT in names else "all",
        # Tied weights that are divided by the root of the width on their way out are ours, scaled up on reading.
        "scaled": OUTPUT not in names and _scaled_output(settings),
    }


def family(settings: Settings, names: Collection[str]) -> Family:
    """Output and embedding are one matrix or two, and the output is scaled or not: four ways, one table."""
    root = settings.count("d_model") ** 0.5
    scaled = _scaled_output(settings)
    if OUTPUT in names:
        output = Place(("decoder.output.layer.weight",), lambda weight: [weight / root if scaled else weight])
        return Family(_model, TABLE, {"shared.weight": Place(EMBEDDINGS), OUTPUT: output}, COPIES, ASIDE)
    tied = Place(TIED.names, lambda weight: [weight / root if scaled else weight])
    return Family(_model, TABLE, {"shared.weight": tied}, COPIES, ASIDE)


ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
