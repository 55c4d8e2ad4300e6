"""Recipes for text-to-text tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transduce.autoconfig.inflection import CHARACTERS, inflect
from transduce.autoconfig.sizes import cosine, pieces_for, recurrent, training_for, transformer
from transduce.autoconfig.statistics import CorpusStatistics

COVERAGE = {"kind": "attention_penalty", "penalty": "coverage", "weight": 0.3, "label_smoothing": 0.0}
PLAIN = {"kind": "cross_entropy", "label_smoothing": 0.0}


def _translate(statistics: CorpusStatistics) -> dict[str, Any]:
    """Sentence-level model: BPE and a Transformer."""
    kind = pieces_for(statistics.pairs)
    tokens = {"source": kind, "target": kind, "shared": statistics.shared}
    return {
        "tokens": tokens,
        "model": transformer(statistics, tokens),
        "training": {**training_for(statistics, True), "monitor": "bleu"},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["bleu", "chrf"]},
    }


def _spell(statistics: CorpusStatistics, target: dict[str, Any], rate: str) -> dict[str, Any]:
    """Character-level model: a GRU encoder-decoder with attention; a source may have several references."""
    return {
        "tokens": {"source": CHARACTERS, "target": target},
        "model": recurrent(statistics),
        "training": {**training_for(statistics, False), "monitor": rate},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["exact", rate], "references": "by_source"},
    }


def _take_over(
    statistics: CorpusStatistics, metrics: list[str], model: dict[str, Any], objective: dict[str, Any]
) -> dict[str, Any]:
    """Outputs that reuse source words: a shared vocabulary of words, placeholders for rare words, copying."""
    words = {"kind": "words", "size": 30_000, "min_count": 5 if statistics.pairs >= 2000 else 2}
    an_epoch = max(1, int(statistics.pairs * (statistics.source.words + statistics.target.words + 3) / 4096))
    steps = int(min(100_000, max(600, 20 * an_epoch)))
    check = max(50, min(1000, steps // 12))
    return {
        "tokens": {"source": words, "target": words, "shared": True, "oov_placeholders": 50},
        "model": {**model, "copy": {}},
        "training": {
            **cosine(steps, check, 4e-3 if statistics.pairs < 20_000 else 2e-3),
            "batch_tokens": 4096,
            "objective": objective,
            "monitor": metrics[-1],
            "patience": 10,
        },
        "generation": {"beam": 5},
        "evaluation": {"metrics": metrics, "references": "by_source"},
    }


def _reader(statistics: CorpusStatistics) -> dict[str, Any]:
    """Recurrent networks: their attention selects the place that a summary or an answer is copied from."""
    width, dropout = (128, 0.1) if statistics.pairs < 20_000 else (256, 0.2)
    part = {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout}
    return {"encoder": part, "decoder": {**part, "context": {"kind": "luong", "input_feeding": False}}}


def _listener(statistics: CorpusStatistics) -> dict[str, Any]:
    """A Transformer, which attends to all turns of a dialogue at once."""
    width, dropout = (64, 0.1) if statistics.pairs < 20_000 else (256, 0.2)
    part = {"kind": "transformer", "width": width, "heads": 4, "ff_width": 2 * width, "dropout": dropout}
    return {"encoder": {**part, "layers": 2}, "decoder": {**part, "layers": 1}}


TEXTS: dict[str, Callable[[CorpusStatistics], dict[str, Any]]] = {
    "translate": _translate,
    "pronounce": lambda statistics: _spell(statistics, {"kind": "words", "size": 1000}, "per"),
    "transliterate": lambda statistics: _spell(statistics, CHARACTERS, "cer"),
    "inflect": inflect,
    "summarise": lambda statistics: _take_over(
        statistics, ["rouge1", "rouge2", "rougeL"], _reader(statistics), COVERAGE
    ),
    "answer": lambda statistics: _take_over(statistics, ["exact", "token_f1"], _reader(statistics), PLAIN),
    "converse": lambda statistics: _take_over(statistics, ["exact", "bleu"], _listener(statistics), PLAIN),
    "describe": lambda statistics: _take_over(statistics, ["chrf", "bleu"], _reader(statistics), PLAIN),
}
