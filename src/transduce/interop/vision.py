"""A Vision Transformer that reads and a decoder that writes: captioners (GPT-2) and readers of print (TrOCR).

Each side has settings of its own in config.json, and its own part of the weights. Where a matrix stands between the
two, it is multiplied into the keys and values of the decoder, which are all that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.errors import InputError
from transduce.interop import bart, gpt2, vit
from transduce.interop.family import Family, Place, Settings

ARCHITECTURE, BETWEEN = "VisionEncoderDecoderModel", "between"
SEEN = {f"encoder.{theirs}": ours for theirs, ours in vit.TABLE.items()}
ROWS = {f"encoder.{theirs}": vit.SPECIAL[theirs] for theirs in vit.SPECIAL if theirs.startswith("embeddings.")}
JOINT = {f"enc_to_dec_proj.{leaf}": Place((f"{BETWEEN}.{leaf}",)) for leaf in ("weight", "bias")}
POOLER = ("encoder.pooler.dense.weight", "encoder.pooler.dense.bias")

# GPT-2 with a look at the memory between its two halves.
CROSS = "decoder.blocks.*.cross"
GPT2 = {
    **{f"decoder.transformer.{theirs}": ours for theirs, ours in gpt2.TABLE.items()},
    "decoder.transformer.h.*.ln_cross_attn": "decoder.blocks.*.residuals.1.norm",
    "decoder.transformer.h.*.ln_2": "decoder.blocks.*.residuals.2.norm",
}
GPT2_SPECIAL = {
    **{f"decoder.transformer.{theirs}": place for theirs, place in gpt2.SPECIAL.items()},
    **{
        f"decoder.transformer.h.*.crossattention.{theirs}.{leaf}": Place(
            tuple(f"{CROSS}.{name}.{leaf}" for name in names), gpt2.parted(len(names))
        )
        for theirs, names in (("q_attn", ("query",)), ("c_attn", ("key", "value")), ("c_proj", ("output",)))
        for leaf in ("weight", "bias")
    },
}
GPT2_ASIDE = tuple(
    f"decoder.transformer.h.*.{part}.{leaf}" for part in ("attn", "crossattention") for leaf in ("bias", "masked_bias")
)
INSIDE = "decoder.model.decoder"
TROCR = {
    **{f"{INSIDE}.layers.*.{theirs}": f"decoder.blocks.*.{ours}" for theirs, ours in bart.DECODER.items()},
    f"{INSIDE}.layernorm_embedding": "decoder.entry",
}
WORDS = f"{INSIDE}.embed_tokens.weight"
SPOKEN = "decoder.output_projection.weight"
PLACES = {
    f"{INSIDE}.embed_positions.weight": bart.POSITIONS["model.decoder.embed_positions.weight"],
}


def _joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """W (P m + p) + b = (W P) m + (W p + b)"""
    weights = vit.joined(weights)
    matrix, offset = (weights.pop(f"{BETWEEN}.{leaf}", None) for leaf in ("weight", "bias"))
    if matrix is None or offset is None:
        return weights
    for name in [name for name in weights if name.endswith((".cross.key.weight", ".cross.value.weight"))]:
        bias = name.replace(".weight", ".bias")
        weights[bias] = weights[bias] + weights[name] @ offset
        weights[name] = weights[name] @ matrix
    return weights


def flattened(settings: Settings) -> Settings:
    """The settings of the decoder, with those of the whole on top: tokens are the decoder's affair."""
    sides = [settings.content.get(side) for side in ("encoder", "decoder")]
    if not all(isinstance(side, dict) for side in sides):
        raise InputError("encoder and decoder have no settings", where=settings.where, remedy="fetch the folder again")
    own = {name: value for name, value in settings.content.items() if value is not None}
    return Settings({**(sides[1] or {}), **own}, settings.where)


def _side(settings: Settings, name: str) -> Settings:
    return Settings(settings.content[name], f"{settings.where}: {name}")


def _captioner(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    own = dict(settings.content)
    own["add_cross_attention"] = False  # which is asked for here, and unknown to GPT-2 alone
    return gpt2.model(Settings(own, settings.where), names)


def _reader(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("is_decoder", True)
    width = "d_model" if "d_model" in settings.content else "hidden_size"
    position: dict[str, Any] = {"kind": "learned", "longest": settings.count("max_position_embeddings", 512)}
    if not settings.flag("use_learned_position_embeddings", True):
        position = {**bart.MARIAN, "inclusive": True, "first": settings.count("pad_token_id", 1) + 1}
    decoder = {
        "kind": "transformer",
        "layers": settings.count("decoder_layers"),
        "width": settings.count(width),
        "heads": settings.count("decoder_attention_heads"),
        "hidden": settings.count("decoder_ffn_dim"),
        "activation": settings.activation("activation_function", "gelu"),
        "norm": "after",
        "embedding_norm": settings.flag("layernorm_embedding", True),
        "position": position,
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
        "hidden_dropout": settings.rate("activation_dropout"),
    }
    tied = settings.flag("tie_word_embeddings", True)
    return {"decoder": decoder, "tie": "target" if tied else "none", "scaled": settings.flag("scale_embedding")}


def family(settings: Settings, names: Collection[str]) -> Family:
    """By what its two sides are."""
    encoder, decoder = (_side(settings, name) for name in ("encoder", "decoder"))
    kinds = encoder.content.get("model_type"), decoder.content.get("model_type")
    if kinds[0] not in ("vit", "deit") or kinds[1] not in ("gpt2", "trocr"):
        raise InputError(
            f"{kinds[0]} with {kinds[1]} cannot be imported", where=settings.where, remedy="vit or deit, gpt2 or trocr"
        )

    def model(whole: Settings, names: Collection[str]) -> dict[str, Any]:
        read = {name.removeprefix("encoder.") for name in names if name.startswith("encoder.")}
        sees = vit.model(_side(whole, "encoder"), read)["encoder"]
        return {"encoder": sees, **(_captioner if kinds[1] == "gpt2" else _reader)(_side(whole, "decoder"), names)}

    def sources(folder: Path, whole: Settings) -> dict[str, Any]:
        return {"picture": vit.picture(folder, _side(whole, "encoder"))}

    if kinds[1] == "gpt2":
        table, special, aside = GPT2, GPT2_SPECIAL, GPT2_ASIDE
        copies: Mapping[str, str] = {"decoder.lm_head.weight": "decoder.transformer.wte.weight"}
    else:
        tied = decoder.flag("tie_word_embeddings", True)
        both = ("decoder.embedding.table.weight", "decoder.output.layer.weight")
        words = {WORDS: Place(both)} if tied else {WORDS: Place(both[:1]), SPOKEN: Place(both[1:])}
        learned = decoder.flag("use_learned_position_embeddings", True)
        table, special, aside = TROCR, {**words, **(PLACES if learned else {})}, ()
        copies = {SPOKEN: WORDS} if tied else {}
    return Family(
        model,
        {**SEEN, **table},
        {**ROWS, **JOINT, **special},
        copies=copies,
        aside=(*POOLER, *aside),
        joined=_joined,
        sources=sources,
    )
