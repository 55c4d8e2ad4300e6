"""Marian, BART, mBART, Pegasus, M2M100 and NLLB: one layout of weights; norms and what tells positions differ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import pad

from transduce.interop.huggingface.family import Family, Place, Settings

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
    "final_logits_bias": Place(
        ("decoder.output.layer.bias",), lambda bias: [bias.flatten()], lambda made: made[0][None]
    ),
}
COPIES = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
WAVES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")  # computed, never learned


def _without_first(table: Tensor) -> list[Tensor]:
    return [table[BEFORE_FIRST:]]


def _with_first(made: list[Tensor]) -> Tensor:
    return pad(made[0], (0, 0, BEFORE_FIRST, 0))


POSITIONS = {
    f"model.{side}.embed_positions.weight": Place((f"{side}.position.table.weight",), _without_first, _with_first)
    for side in ("encoder", "decoder")
}


Norm = Literal["pre", "post"]
MARIAN = {"kind": "sinusoidal", "halves": True}


def _part(settings: Settings, side: str, norm: Norm, waves: dict[str, Any] | None) -> dict[str, Any]:
    learned = {"kind": "learned", "longest": settings.count("max_position_embeddings", 1024)}
    return {
        "kind": "transformer",
        "layers": settings.count(f"{side}_layers"),
        "width": settings.count("d_model"),
        "heads": settings.count(f"{side}_attention_heads"),
        "ff_width": settings.count(f"{side}_ffn_dim"),
        "activation": settings.activation("activation_function", "gelu"),
        "norm": norm,
        "embedding_norm": waves is None,
        "position": waves or learned,
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
        "activation_dropout": settings.rate("activation_dropout"),
    }


def _model(settings: Settings, norm: Norm, waves: dict[str, Any] | None = None) -> dict[str, Any]:
    """Positions are learned where they are no waves."""
    settings.only("tie_word_embeddings", True)
    settings.only("share_encoder_decoder_embeddings", True)
    return {
        "encoder": _part(settings, "encoder", norm, waves),
        "decoder": _part(settings, "decoder", norm, waves),
        "tie": "all",
        "scale_embedding": settings.flag("scale_embedding"),
    }


def _marian(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("normalize_before", False)
    settings.only("normalize_embedding", False)
    return _model(settings, "post", MARIAN)


def _bart(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("normalize_before", False)
    settings.only("normalize_embedding", True)
    return _model(settings, "post")


def _mbart(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    return _model(settings, "pre")


def _pegasus(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    return _model(settings, "pre", MARIAN)


def _m2m(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    """Its first token stands at the place after the number of <pad>, as in fairseq."""
    return _model(settings, "pre", {**MARIAN, "inclusive": True, "first": settings.count("pad_token_id") + 1})


FAMILIES = {
    "MarianMTModel": Family(_marian, TABLE, OUTPUT, COPIES, WAVES),
    "BartForConditionalGeneration": Family(_bart, {**TABLE, **ENTRY}, {**OUTPUT, **POSITIONS}, COPIES),
    "MBartForConditionalGeneration": Family(
        _mbart, {**TABLE, **ENTRY, **FINAL}, {**OUTPUT, **POSITIONS}, COPIES, languages="may"
    ),
    "M2M100ForConditionalGeneration": Family(
        _m2m, {**TABLE, **FINAL}, {"model.shared.weight": TOKENS}, COPIES, WAVES, languages="must"
    ),
    "PegasusForConditionalGeneration": Family(_pegasus, {**TABLE, **FINAL}, OUTPUT, COPIES, WAVES),
}
