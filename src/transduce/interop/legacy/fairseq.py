"""fairseq: Transformers in the layout that BART has, and LSTMs; settings in the checkpoint, dictionaries beside."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transduce.errors import InputError
from transduce.interop.huggingface import bart
from transduce.interop.huggingface.family import Family, Place, Settings
from transduce.interop.legacy import recurrent as recurrences
from transduce.interop.legacy.assemble import Orphan
from transduce.interop.legacy.checkpoint_process import Checkpoint
from transduce.interop.legacy.vocabularies import Side, Special, read_lines, spaced

SIDES = ("encoder", "decoder")
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "swish": "silu",
}
FIRST = ("<s>", "<pad>", "</s>", "<unk>")  # stand before the words of a dictionary, which does not name them
TABLE = {
    **{theirs.removeprefix("model."): ours for theirs, ours in (bart.TABLE | bart.ENTRY | bart.FINAL).items()},
    **{f"{side}.embed_tokens": f"{side}.embedding.table" for side in SIDES},
    "decoder.output_projection": "decoder.output.layer",
}
POSITIONS = {name.removeprefix("model."): Place(place.names, place.change) for name, place in bart.POSITIONS.items()}
ASIDE = tuple(f"{side}.{name}" for side in SIDES for name in ("version", "embed_positions._float_tensor"))
NOT_HERE = (  # options that change what is computed
    "no_token_positional_embeddings",
    "no_cross_attention",
    "cross_self_attention",
    "no_decoder_final_norm",
    "char_inputs",
    "tie_adaptive_weights",
    "scale_attn",
    "scale_fc",
    "scale_heads",
    "scale_resids",
)
SEARCH = {"strategy": "huggingface_beam", "beam": 5, "stop": "full", "length_penalty": 1.0, "max_length": 200}


def _part(settings: Settings, side: str) -> dict[str, Any]:
    activation = settings.content.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        remedy = f"known: {', '.join(ACTIVATIONS)}"
        raise InputError(f"activation_fn: there is no {activation!r} here", where=settings.where, remedy=remedy)
    longest = settings.count("max_source_positions" if side == "encoder" else "max_target_positions", 1024)
    waves = {"kind": "sinusoidal", "halves": True, "inclusive": True, "first": bart.BEFORE_FIRST}
    learned = {"kind": "learned", "longest": longest}
    return {
        "kind": "transformer",
        "layers": settings.count(f"{side}_layers"),
        "width": settings.count(f"{side}_embed_dim"),
        "heads": settings.count(f"{side}_attention_heads"),
        "ff_width": settings.count(f"{side}_ffn_embed_dim"),
        "activation": ACTIVATIONS[activation],
        "norm": "pre" if settings.flag(f"{side}_normalize_before") else "post",
        "embedding_norm": settings.flag("layernorm_embedding"),
        "position": learned if settings.flag(f"{side}_learned_pos") else waves,
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
        "activation_dropout": settings.rate("activation_dropout"),
    }


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    for name in NOT_HERE:
        if settings.content.get(name):
            settings.only(name, False)
    tied = settings.flag("share_all_embeddings") or settings.flag("share_decoder_input_output_embed")
    return {
        "encoder": _part(settings, "encoder"),
        "decoder": _part(settings, "decoder"),
        "tie": "all" if settings.flag("share_all_embeddings") else ("target" if tied else "none"),
        "scale_embedding": not settings.flag("no_scale_embedding"),
    }


def _lstm(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    if settings.content.get("decoder_attention", "1") not in ("1", "True", 1, True):
        settings.only("decoder_attention", "1")
    both = settings.flag("encoder_bidirectional")
    encoder = {
        "layers": settings.count("encoder_layers"),
        "width": settings.count("encoder_hidden_size") * (2 if both else 1),
        "bidirectional": both,
        "summary": "states",
    }
    decoder = {
        "layers": settings.count("decoder_layers"),
        "width": settings.count("decoder_hidden_size"),
        "bridge": "states",
        "context": {"kind": "luong", "score": "bilinear"},
    }
    shared = {"cell": "lstm", "dropout": settings.rate("dropout")}
    tied = settings.flag("share_decoder_input_output_embed") or settings.flag("share_all_embeddings")
    every = settings.flag("share_all_embeddings")
    return recurrences.parts(shared, encoder, decoder) | {"tie": ("all" if every else "target") if tied else "none"}


TRANSFORMER = Family(_model, TABLE, POSITIONS, aside=ASIDE)
LSTM = Family(
    _lstm,
    {
        **recurrences.TABLE,
        **{f"{side}.embed_tokens": f"{side}.embedding.table" for side in SIDES},
        "decoder.attention.output_proj": recurrences.COMBINE,
        "decoder.fc_out": "decoder.output.layer",
    },
    {"decoder.attention.input_proj.weight": recurrences.BILINEAR},
    aside=ASIDE,
    joined=recurrences.widened,
)


def read(checkpoint: Checkpoint) -> Orphan:
    content = _settings(checkpoint)
    settings = Settings(content, str(checkpoint.file))
    weights = {name.removeprefix("model/"): one for name, one in checkpoint.weights.items()}
    source, target = (_side(checkpoint.file.parent, _language(settings, side)) for side in ("source", "target"))
    family = TRANSFORMER
    if "encoder.lstm.weight_ih_l0" in weights:
        family, weights = LSTM, {recurrences.renamed(name): one for name, one in weights.items()}
    return Orphan(family, settings, weights, source, target, generation=SEARCH)


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options of the model and of its task: in one namespace, or by sections in newer checkpoints."""
    options, sections = checkpoint.settings.get("args"), checkpoint.settings.get("cfg")
    if isinstance(options, dict):
        return options
    named = [sections.get(name) for name in ("task", "model")] if isinstance(sections, dict) else []
    found = [one for one in named if isinstance(one, dict)]
    if len(found) != 2:
        raise InputError("it has no args, and no cfg with model and task", where=str(checkpoint.file))
    return found[0] | found[1]


def _language(settings: Settings, side: str) -> str:
    name = settings.content.get(f"{side}_lang")
    if not isinstance(name, str) or not name:
        raise InputError(f"it names no {side}_lang", where=settings.where, remedy="only translation models can be read")
    return name


def _side(folder: Path, language: str) -> Side:
    """An output starts with </s>, which ends it too."""
    name = f"dict.{language}.txt"
    words = list(FIRST)
    for number, line in enumerate(read_lines(folder, name), 1):
        word, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not word or not count.isdecimal():
            raise InputError(
                "expected a word and its count", where=f"{folder / name}:{number}", remedy="fetch it again"
            )
        words.append(word)
    pad, end, unknown = (FIRST.index(name) for name in ("<pad>", "</s>", "<unk>"))
    return spaced(words, Special(pad, end, end, unknown), str(folder / name))
