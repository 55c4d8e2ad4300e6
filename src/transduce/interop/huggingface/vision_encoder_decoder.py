"""A Vision Transformer that reads and a decoder that writes: GPT-2, TrOCR, BERT, RoBERTa.

Each side has settings of its own in config.json, and its own part of the weights. Where a matrix stands between the
two, it is multiplied into the keys and values of the decoder, which are all that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.errors import InputError
from transduce.interop.huggingface import bart, bert, gpt2, vit
from transduce.interop.huggingface.family import Family, Place, Settings

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
# What reads both ways elsewhere, as a decoder: it looks at the memory, and has a layer before its output.
BERT = {
    **{f"encoder.layer.*.{theirs}": f"decoder.blocks.*.{ours}" for theirs, ours in bert.LAYER.items()},
    **{
        f"encoder.layer.*.crossattention.{theirs}": f"{CROSS}.{ours}"
        for theirs, ours in (
            ("self.query", "query"), ("self.key", "key"), ("self.value", "value"), ("output.dense", "output"),
        )
    },
    "encoder.layer.*.crossattention.output.LayerNorm": "decoder.blocks.*.residuals.1.norm",
    "encoder.layer.*.output.LayerNorm": "decoder.blocks.*.residuals.2.norm",
    "embeddings.LayerNorm": "decoder.entry",
}  # fmt: skip
DEEP = {bert.HIDDEN: "decoder.output.before.0", bert.NORM: "decoder.output.before.2"}
TOKENS = ("decoder.embedding.table.weight", "decoder.output.layer.weight")
WRITERS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "Roberta", "camembert": "Roberta"}


def _joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """W (P m + p) + b = (W P) m + (W p + b)"""
    weights = bert.one_segment(vit.joined(weights), "decoder")
    matrix, offset = (weights.pop(f"{BETWEEN}.{leaf}", None) for leaf in ("weight", "bias"))
    if matrix is None or offset is None:
        return weights
    for name in [name for name in weights if name.endswith((".cross.key.weight", ".cross.value.weight"))]:
        bias = name.replace(".weight", ".bias")
        weights[bias] = weights[bias] + weights[name] @ offset
        weights[name] = weights[name] @ matrix
    return weights


@dataclass(frozen=True)
class Written:
    """The names of what writes, as `Family` has them."""

    table: Mapping[str, str]
    special: Mapping[str, Place]
    copies: Mapping[str, str]
    aside: tuple[str, ...]


CAPTION = Written(GPT2, GPT2_SPECIAL, {"decoder.lm_head.weight": "decoder.transformer.wte.weight"}, GPT2_ASIDE)


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
        "ff_width": settings.count("decoder_ffn_dim"),
        "activation": settings.activation("activation_function", "gelu"),
        "norm": "post",
        "embedding_norm": settings.flag("layernorm_embedding", True),
        "position": position,
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
        "activation_dropout": settings.rate("activation_dropout"),
    }
    tied = settings.flag("tie_word_embeddings", True)
    return {
        "decoder": decoder,
        "tie": "target" if tied else "none",
        "scale_embedding": settings.flag("scale_embedding"),
    }


def _filler(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    settings.only("hidden_act", "gelu")
    settings.only("tie_word_embeddings", True)
    settings.only("is_decoder", True)
    own = {**settings.content, "is_decoder": False}  # which is asked for here, and unknown to BERT alone
    decoder = bert.ENCODERS[WRITERS[own["model_type"]]](Settings(own, settings.where))
    return {"decoder": decoder, "tie": "target", "scale_embedding": False, "output": "deep"}


def _filling(kind: str) -> Written:
    """Names as BERT and RoBERTa have them, inside a decoder."""
    inside, (modules, bias, copies) = f"decoder.{kind.lower()}", bert.FILLERS[kind]
    first = bert.BEFORE_FIRST if kind == "Roberta" else 0
    return Written(
        {
            **{f"{inside}.{theirs}": ours for theirs, ours in BERT.items()},
            **{f"decoder.{theirs}": DEEP[ours] for theirs, ours in modules.items()},
        },
        {
            f"{inside}.{bert.WORDS}": Place(TOKENS),
            f"{inside}.{bert.PLACES}": Place(("decoder.position.table.weight",), lambda table: [table[first:]]),
            f"{inside}.embeddings.token_type_embeddings.weight": Place((bert.SEGMENTS,)),
            f"decoder.{bias}": Place((TOKENS[1].replace("weight", "bias"),)),
        },
        {
            f"decoder.{copy}": f"{inside}.{one}" if one == bert.WORDS else f"decoder.{one}"
            for copy, one in copies.items()
        },
        (f"{inside}.embeddings.position_ids",),
    )


def _printed(decoder: Settings) -> Written:
    tied, learned = (decoder.flag(one, True) for one in ("tie_word_embeddings", "use_learned_position_embeddings"))
    words = {WORDS: Place(TOKENS)} if tied else {WORDS: Place(TOKENS[:1]), SPOKEN: Place(TOKENS[1:])}
    return Written(TROCR, {**words, **(PLACES if learned else {})}, {SPOKEN: WORDS} if tied else {}, ())


def family(settings: Settings, names: Collection[str]) -> Family:
    """By what its two sides are."""
    encoder, decoder = (_side(settings, name) for name in ("encoder", "decoder"))
    sees, writes = (str(one.content.get("model_type")) for one in (encoder, decoder))
    if sees not in ("vit", "deit") or writes not in ("gpt2", "trocr", *WRITERS):
        raise InputError(
            f"{sees} with {writes} cannot be imported",
            where=settings.where,
            remedy=f"vit or deit, with gpt2, trocr, {', '.join(WRITERS)}",
        )
    if writes == "gpt2":
        make, written = _captioner, CAPTION
    elif writes == "trocr":
        make, written = _reader, _printed(decoder)
    else:
        make, written = _filler, _filling(WRITERS[writes])

    def model(whole: Settings, names: Collection[str]) -> dict[str, Any]:
        read = {name.removeprefix("encoder.") for name in names if name.startswith("encoder.")}
        eye = vit.model(_side(whole, "encoder"), read)["encoder"]
        return {"encoder": eye, **make(_side(whole, "decoder"), names)}

    def sources(folder: Path, whole: Settings) -> dict[str, Any]:
        return {"picture": vit.picture(folder, _side(whole, "encoder"))}

    return Family(
        model,
        {**SEEN, **written.table},
        {**ROWS, **JOINT, **written.special},
        copies=written.copies,
        aside=(*POOLER, *written.aside),
        joined=_joined,
        sources=sources,
    )
