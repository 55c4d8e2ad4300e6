"""OpenNMT-py: Transformers and recurrent models, words and options in the checkpoint, no </s> after a source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transduce.errors import InputError
from transduce.interop.huggingface.family import Family, Settings
from transduce.interop.legacy import recurrent as recurrences
from transduce.interop.legacy.assemble import Orphan
from transduce.interop.legacy.checkpoint_process import Checkpoint
from transduce.interop.legacy.vocabularies import Side, Special, spaced

ATTENTION = {"linear_query": "query", "linear_keys": "key", "linear_values": "value", "final_linear": "output"}
FEED = {"feed_forward.w_1": "feed_forward.grow", "feed_forward.w_2": "feed_forward.shrink"}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


def _layer(parts: Mapping[str, str], norms: Mapping[str, int]) -> dict[str, str]:
    table = {f"{theirs}.{a}": f"{ours}.{b}" for theirs, ours in parts.items() for a, b in ATTENTION.items()}
    return table | FEED | {theirs: f"residuals.{number}.norm" for theirs, number in norms.items()}


ENCODER = _layer({"self_attn": "own.attention"}, {"layer_norm": 0, "feed_forward.layer_norm": 1})
DECODER = _layer(
    {"self_attn": "own.attention", "context_attn": "cross"},
    {"layer_norm_1": 0, "layer_norm_2": 1, "feed_forward.layer_norm": 2},
)
TABLE = {
    **{f"encoder.transformer.*.{theirs}": f"encoder.blocks.*.{ours}" for theirs, ours in ENCODER.items()},
    **{f"decoder.transformer_layers.*.{theirs}": f"decoder.blocks.*.{ours}" for theirs, ours in DECODER.items()},
    **{f"{side}.layer_norm": f"{side}.norm" for side in ("encoder", "decoder")},
    **{f"{side}.embeddings.words": f"{side}.embedding.table" for side in ("encoder", "decoder")},
    "generator": "decoder.output.layer",
}
LONG = "embeddings.make_embedding."  # what stands before the words of a side, and its waves
WAVES = ("encoder.embeddings.pe.pe", "decoder.embeddings.pe.pe")
# Later versions leave these out by default.
PLAIN = (*(f".{name}.bias" for name in ATTENTION.values()), ".grow.bias", ".shrink.bias")


def _part(settings: Settings, side: str) -> dict[str, Any]:
    activation = settings.content.get("pos_ffn_activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        problem = f"pos_ffn_activation_fn: there is no {activation!r} here"
        raise InputError(problem, where=settings.where, remedy=f"known: {', '.join(ACTIVATIONS)}")
    return {
        "kind": "transformer",
        "layers": settings.count(f"{side[:3]}_layers"),
        "width": _width(settings, side),
        "heads": settings.count("heads", 8),
        "ff_width": settings.count("transformer_ff", 2048),
        "activation": ACTIVATIONS[activation],
        "norm_eps": settings.rate("norm_eps", 1e-6),
        "position": "sinusoidal",
        "dropout": _first(settings, "dropout"),
        "attention_dropout": _first(settings, "attention_dropout"),
        "activation_dropout": _first(settings, "dropout"),
    }


def _width(settings: Settings, side: str) -> int:
    """Names of the option in several versions, those of one side first."""
    names = (f"{side[:3]}_hid_size", f"{side[:3]}_rnn_size", "hidden_size", "rnn_size")
    return settings.count(next((name for name in names if settings.content.get(name)), "hidden_size"))


def _first(settings: Settings, name: str) -> float:
    """A rate may change while it trains: a list."""
    value = settings.content.get(name)
    return Settings({name: value[0] if isinstance(value, list) and value else value or 0.0}, settings.where).rate(name)


def _model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    for name, wanted in (
        ("encoder_type", "transformer"),
        ("decoder_type", "transformer"),
        ("position_encoding", True),
        ("max_relative_positions", 0),
        ("self_attn_type", "scaled-dot"),
        ("layer_norm", "standard"),
        ("parallel_residual", False),
        ("multiquery", False),
        ("copy_attn", False),
        ("generator_function", "softmax"),
        ("position_encoding_type", "SinusoidalInterleaved"),
    ):
        settings.only(name, wanted)
    every = settings.flag("share_embeddings")
    tied = settings.flag("share_decoder_embeddings")
    return {
        "encoder": _part(settings, "encoder"),
        "decoder": _part(settings, "decoder"),
        "tie": ("all" if every else "target") if tied else "none",
        "scale_embedding": True,
        "source_eos": False,
    }


def _recurrent(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    for name, wanted in (
        ("bridge", False),
        ("copy_attn", False),
        ("coverage_attn", False),
        ("input_feed", 1),
        ("global_attention_function", "softmax"),
        ("generator_function", "softmax"),
    ):
        settings.only(name, wanted)
    cell, score = settings.content.get("rnn_type", "LSTM"), settings.content.get("global_attention", "general")
    if cell not in ("LSTM", "GRU") or score not in ("general", "dot"):
        remedy = "known: LSTM and GRU; general and dot"
        raise InputError(f"{cell} with attention {score!r} cannot be imported", where=settings.where, remedy=remedy)
    encoder = {
        "layers": settings.count("enc_layers"),
        "width": _width(settings, "encoder"),
        "bidirectional": settings.content.get("encoder_type") == "brnn",
        "summary": "states",
    }
    decoder = {
        "layers": settings.count("dec_layers"),
        "width": _width(settings, "decoder"),
        "bridge": "states",
        "context": {"kind": "luong", "score": "bilinear" if score == "general" else "dot"},
    }
    shared = {"cell": cell.lower(), "dropout": _first(settings, "dropout")}
    model = recurrences.parts(shared, encoder, decoder)
    return model | {"tie": "target" if settings.flag("share_decoder_embeddings") else "none", "source_eos": False}


TRANSFORMER = Family(_model, TABLE, aside=WAVES)
RECURRENT = Family(
    _recurrent,
    {
        **recurrences.TABLE,
        **{name: TABLE[name] for name in ("encoder.embeddings.words", "decoder.embeddings.words", "generator")},
        "decoder.attn.linear_out": recurrences.COMBINE,
    },
    {"decoder.attn.linear_in.weight": recurrences.BILINEAR},
    joined=recurrences.widened,
)


def _renamed(name: str) -> str:
    part, _, name = name.partition("/")
    if part == "generator":  # a layer, or the first of a sequence
        return f"generator.{name.removeprefix('0.')}"
    return name.replace(f"{LONG}emb_luts.0.", "embeddings.words.").replace(LONG, "embeddings.")


def read(checkpoint: Checkpoint) -> Orphan:
    content = checkpoint.settings.get("opt")
    if not isinstance(content, dict):
        raise InputError("it has no opt", where=str(checkpoint.file), remedy="fetch it again")
    weights = {_renamed(name): one for name, one in checkpoint.weights.items()}
    source, target = (_side(checkpoint, side) for side in ("src", "tgt"))
    family = TRANSFORMER
    if content.get("encoder_type") in ("rnn", "brnn"):
        family, weights = RECURRENT, {recurrences.renamed(name): one for name, one in weights.items()}
    return Orphan(family, Settings(content, str(checkpoint.file)), weights, source, target, PLAIN, {"beam": 5})


def _side(checkpoint: Checkpoint, side: str) -> Side:
    kept = checkpoint.settings.get("vocab")
    vocabulary: dict[str, Any] = kept if isinstance(kept, dict) else {}
    words = vocabulary.get(side)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or not words:
        raise InputError(
            f"its vocabulary has no list of words for {side}",
            where=str(checkpoint.file),
            remedy="convert it with tools/convertv2_v3.py of OpenNMT-py 3, as versions before keep objects there",
        )
    start = vocabulary.get("decoder_start_token") or "<s>"
    number = {word: place for place, word in reversed(list(enumerate(words)))}
    # A source is closed by nothing, but a vocabulary of ours has a token for that.
    special = Special(number.get("<blank>"), number.get(start), number.get("</s>"), number.get("<unk>"))
    return spaced(words, special, str(checkpoint.file))
