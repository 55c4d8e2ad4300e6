"""BERT, RoBERTa and DistilBERT: an encoder alone, norm after, and a norm over the sum of its embeddings.

Around it there is nothing (hidden states, of which vectors of texts are made), what fills masks, what gives one label
to a text, or what gives one to each of its words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from transduce.interop.huggingface.family import Family, Place, Settings
from transduce.interop.huggingface.labels import after_specials, without_specials

LAYER = {
    "attention.self.query": "own.attention.query",
    "attention.self.key": "own.attention.key",
    "attention.self.value": "own.attention.value",
    "attention.output.dense": "own.attention.output",
    "attention.output.LayerNorm": "residuals.0.norm",
    "intermediate.dense": "feed_forward.grow",
    "output.dense": "feed_forward.shrink",
    "output.LayerNorm": "residuals.1.norm",
}
DISTILLED = {
    "attention.q_lin": "own.attention.query",
    "attention.k_lin": "own.attention.key",
    "attention.v_lin": "own.attention.value",
    "attention.out_lin": "own.attention.output",
    "sa_layer_norm": "residuals.0.norm",
    "ffn.lin1": "feed_forward.grow",
    "ffn.lin2": "feed_forward.shrink",
    "output_layer_norm": "residuals.1.norm",
}
ENTRY = {"embeddings.LayerNorm": "encoder.entry", "embeddings.position_embeddings": "encoder.position.table"}
TABLE = {**{f"encoder.layer.*.{theirs}": f"encoder.blocks.*.{ours}" for theirs, ours in LAYER.items()}, **ENTRY}
SHORT = {**{f"transformer.layer.*.{theirs}": f"encoder.blocks.*.{ours}" for theirs, ours in DISTILLED.items()}, **ENTRY}
SEGMENTS = "segments"
WORDS, PLACES = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
TOKENS = {WORDS: Place(("encoder.embedding.table.weight",))}
TYPES = {"embeddings.token_type_embeddings.weight": Place((SEGMENTS,))}
BEFORE_FIRST = 2  # of RoBERTa, whose first token stands at the place after that of <pad>

# What fills masks; its matrix of tokens is that of the embedding.
FILLED = "head.output.layer.bias"
HIDDEN, NORM, FIRST, LAST = "head.layers.1", "head.layers.3", "head.layers.1", "head.layers.3"
TIED = {WORDS: Place(("encoder.embedding.table.weight", "head.output.layer.weight"))}
FILLERS: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {  # modules, the bias of its output, copies
    "Bert": (
        {"cls.predictions.transform.dense": HIDDEN, "cls.predictions.transform.LayerNorm": NORM},
        "cls.predictions.bias",
        {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    "Roberta": (
        {"lm_head.dense": HIDDEN, "lm_head.layer_norm": NORM},
        "lm_head.bias",
        {"lm_head.decoder.weight": WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    ),
    "DistilBert": (
        {"vocab_transform": HIDDEN, "vocab_layer_norm": NORM},
        "vocab_projector.bias",
        {"vocab_projector.weight": WORDS},
    ),
}
# The layer before that of the labels, with what is done to it, and that of the labels.
CLASSIFIERS = {
    "Bert": ("pooler.dense", "tanh", "classifier"),
    "Roberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "DistilBert": ("pre_classifier", "relu", "classifier"),
}


def _aside(kind: str) -> tuple[str, ...]:
    """What hidden states do not need: places as numbers, the pooler for next sentences, what fills masks."""
    modules, bias, copies = FILLERS[kind]
    names = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias", "gamma", "beta")]
    names += [f"{module}.{leaf}" for module in ("pooler.dense", "cls.seq_relationship") for leaf in ("weight", "bias")]
    return ("embeddings.position_ids", *names, bias, *copies)


def _encoder(settings: Settings) -> dict[str, Any]:
    settings.only("position_embedding_type", "absolute")
    settings.only("is_decoder", False)
    return {
        "kind": "transformer",
        "layers": settings.count("num_hidden_layers"),
        "width": settings.count("hidden_size"),
        "heads": settings.count("num_attention_heads"),
        "ff_width": settings.count("intermediate_size"),
        "activation": settings.activation("hidden_act", "gelu"),
        "norm": "post",
        "norm_eps": settings.rate("layer_norm_eps", 1e-12),
        "embedding_norm": True,
        "position": {"kind": "learned", "longest": settings.count("max_position_embeddings", 512)},
        "dropout": settings.rate("hidden_dropout_prob"),
        "attention_dropout": settings.rate("attention_probs_dropout_prob"),
    }


def _after_padding(settings: Settings) -> dict[str, Any]:
    settings.only("pad_token_id", BEFORE_FIRST - 1)
    encoder = _encoder(settings)
    encoder["position"]["longest"] -= BEFORE_FIRST
    return encoder


def _distilled(settings: Settings) -> dict[str, Any]:
    return {
        "kind": "transformer",
        "layers": settings.count("n_layers"),
        "width": settings.count("dim"),
        "heads": settings.count("n_heads"),
        "ff_width": settings.count("hidden_dim"),
        "activation": settings.activation("activation", "gelu"),
        "norm": "post",
        "norm_eps": 1e-12,
        "embedding_norm": True,
        "position": {"kind": "learned", "longest": settings.count("max_position_embeddings", 512)},
        "dropout": settings.rate("dropout"),
        "attention_dropout": settings.rate("attention_dropout"),
    }


Made = Callable[[Settings], dict[str, Any]]
ENCODERS: dict[str, Made] = {"Bert": _encoder, "Roberta": _after_padding, "DistilBert": _distilled}
TABLES = {"Bert": TABLE, "Roberta": TABLE, "DistilBert": SHORT}
SPECIALS = {
    "Bert": {**TOKENS, **TYPES},
    "Roberta": {
        **TOKENS,
        **TYPES,
        PLACES: Place(
            ("encoder.position.table.weight",),
            lambda table: [table[BEFORE_FIRST:]],
            lambda made: pad(made[0], (0, 0, BEFORE_FIRST, 0)),
        ),
    },
    "DistilBert": TOKENS,
}


def one_segment(weights: dict[str, Tensor], side: str = "encoder") -> dict[str, Tensor]:
    """A text is one segment, the first: its vector is the same at every place, so it goes with the places."""
    segments = weights.pop(SEGMENTS, None)
    if segments is not None and (name := f"{side}.position.table.weight") in weights:
        weights[name] = weights[name] + segments[0]
    return weights


def _family(kind: str, head: dict[str, Any], **more: Any) -> Family:
    def model(settings: Settings, names: Collection[str]) -> dict[str, Any]:
        encoder = ENCODERS[kind](settings)
        made = {"encoder": encoder, "head": dict(head), "scale_embedding": False}
        if head["kind"] == "mlm":
            settings.only("activation" if kind == "DistilBert" else "hidden_act", "gelu")
            settings.only("tie_word_embeddings", True)
            made |= {"head": {**head, "norm_eps": encoder["norm_eps"]}, "tie": "target"}
        return made

    given = {"table": TABLES[kind], "special": SPECIALS[kind], "aside": _aside(kind), **more}
    return Family(model, joined=one_segment, starts="", prefix=f"{kind.lower()}.", **given)


def _filler(kind: str) -> Family:
    modules, bias, copies = FILLERS[kind]
    return _family(
        kind,
        {"kind": "mlm"},
        table={**TABLES[kind], **modules},
        special={**SPECIALS[kind], **TIED, bias: Place((FILLED,))},
        copies=copies,
        aside=tuple(set(_aside(kind)) - {bias, *copies}),
        data={"format": "text", "noise": {"kind": "mask_tokens"}},
    )


def _labels(theirs: str, ours: str) -> dict[str, Place]:
    return {
        f"{theirs}.{leaf}": Place((f"{ours}.{leaf}",), after_specials, without_specials) for leaf in ("weight", "bias")
    }


def _classifier(kind: str) -> Family:
    before, activation, last = CLASSIFIERS[kind]
    return _family(
        kind,
        {"kind": "classifier", "pooling": "first", "activation": activation},
        table={**TABLES[kind], before: FIRST},
        special={**SPECIALS[kind], **_labels(last, LAST)},
        labels="labels",
    )


def _tagger(kind: str) -> Family:
    special = {**SPECIALS[kind], **_labels("classifier", "head.layers.1")}
    return _family(kind, {"kind": "tagger"}, special=special, labels="words")


EMBEDDER = {"kind": "embedder", "pooling": "mean", "normalise": False}
# XLM-RoBERTa and CamemBERT are RoBERTa with other tokens.
NAMED = {
    "Bert": "Bert",
    "Roberta": "Roberta",
    "XLMRoberta": "Roberta",
    "Camembert": "Roberta",
    "DistilBert": "DistilBert",
}
FAMILIES = {
    f"{name}{shape}": made
    for name, kind in NAMED.items()
    for shape, made in (
        ("Model", _family(kind, EMBEDDER)),
        ("ForMaskedLM", _filler(kind)),
        ("ForSequenceClassification", _classifier(kind)),
        ("ForTokenClassification", _tagger(kind)),
    )
}
