"""Marian, BART, mBART and Pegasus: one layout of weights; where norms stand and what tells positions differs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from torch import Tensor

from transduce.interop.family import Family, Place, Settings

BEFORE_FIRST = 2  # rows of a table of learned positions that stand before that of the first token

LAYER = {
    "self_attn.q_proj": "own.attention.query",
    "self_attn.k_proj": "own.attention.key",
    "self_attn.v_proj": "own.attention.value",
    "self_attn.out_proj": "own.attention.output",
    "self_attn_layer_norm": "residuals.0.norm",
    "fc1": "feed_forward.grow",
    "fc2": "feed_forward.shrink",
}
ENCODER = {**LAYER, "final_layer_norm": "residuals.1.norm"}
DECODER = {
    **LAYER,
    "encoder_attn.q_proj": "cross.query",
    "encoder_attn.k_proj": "cross.key",
    "encoder_attn.v_proj": "cross.value",
    "encoder_attn.out_proj": "cross.output",
    "encoder_attn_layer_norm": "residuals.1.norm",
    "final_layer_norm": "residuals.2.norm",
}
TABLE = {
    **{f"model.encoder.layers.*.{theirs}": f"encoder.blocks.*.{ours}" for theirs, ours in ENCODER.items()},
    **{f"model.decoder.layers.*.{theirs}": f"decoder.blocks.*.{ours}" for theirs, ours in DECODER.items()},
}
ENTRY = {f"model.{side}.layernorm_embedding": f"{side}.entry" for side in ("encoder", "decoder")}
FINAL = {f"model.{side}.layer_norm": f"{side}.norm" for side in ("encoder", "decoder")}

TOKENS = Place(("encoder.embedding.table.weight", "decoder.embedding.table.weight", "decoder.output.layer.weight"))
OUTPUT = {
    "model.shared.weight": TOKENS,
    "final_logits_bias": Place(("decoder.output.layer.bias",), lambda bias: [bias.flatten()]),
}
COPIES = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
WAVES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")  # computed, never learned


def _without_first(table: Tensor) -> list[Tensor]:
    return [table[BEFORE_FIRST:]]


POSITIONS = {
    f"model.{side}.embed_positions.weight": Place((f"{side}.position.table.weight",), _without_first)
    for side in ("encoder", "decoder")
}


def _part(settings: Settings, side: str, norm: Literal["before", "after"], learned: bool) -> dict[str, Any]:
    longest = settings.count("max_position_embeddings", 1024)
    return {
        "kind": "transformer",
        "layers": settings.count(f"{side}_layers"),
        "width": settings.count("d_model"),
        "heads": settings.count(f"{side}_attention_heads"),
        "hidden": settings.count(f"{side}_ffn_dim"),
        "activation": settings.activation("activation_function", "gelu"),
        "norm": norm,
        "embedding_norm": learned,
        "position": {"kind": "learned", "longest": longest} if learned else {"kind": "sinusoidal", "halves": True},
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
        "hidden_dropout": settings.rate("activation_dropout"),
    }


def _model(settings: Settings, norm: Literal["before", "after"], learned: bool) -> dict[str, Any]:
    settings.only("tie_word_embeddings", True)
    settings.only("share_encoder_decoder_embeddings", True)
    return {
        "encoder": _part(settings, "encoder", norm, learned),
        "decoder": _part(settings, "decoder", norm, learned),
        "tie": "all",
        "scaled": settings.flag("scale_embedding"),
    }


def _marian(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("normalize_before", False)
    settings.only("normalize_embedding", False)
    return _model(settings, "after", learned=False)


def _bart(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("normalize_before", False)
    settings.only("normalize_embedding", True)
    return _model(settings, "after", learned=True)


def _mbart(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    return _model(settings, "before", learned=True)


def _pegasus(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    return _model(settings, "before", learned=False)


FAMILIES = {
    "MarianMTModel": Family(_marian, TABLE, OUTPUT, COPIES, WAVES),
    "BartForConditionalGeneration": Family(_bart, {**TABLE, **ENTRY}, {**OUTPUT, **POSITIONS}, COPIES),
    "MBartForConditionalGeneration": Family(_mbart, {**TABLE, **ENTRY, **FINAL}, {**OUTPUT, **POSITIONS}, COPIES),
    "PegasusForConditionalGeneration": Family(_pegasus, {**TABLE, **FINAL}, OUTPUT, COPIES, WAVES),
}
