"""Recipes for text-to-text tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transduce.autoconfig.inflection import CHARACTERS, inflect
from transduce.autoconfig.sizes import Chosen, TimeBudget, cosine, letters_of, pairs_recipe, pieces_for, share
from transduce.autoconfig.statistics import CorpusStatistics

COVERAGE = {"kind": "attention_penalty", "penalty": "coverage", "weight": 0.3, "label_smoothing": 0.0}
PLAIN = {"kind": "cross_entropy", "label_smoothing": 0.0}


def _translate(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
    """Sentence-level model: BPE and a Transformer."""
    kind = Chosen(pieces_for(statistics.pairs), "translation: a piece for every three pairs, up to 8,000")
    tokens = {"source": kind, "target": kind, "shared": share(statistics.shared, statistics)}
    return pairs_recipe(statistics, tokens, ["bleu", "chrf"], True, budget)


def _spell(target: dict[str, Any], rate: str) -> Callable[[CorpusStatistics, TimeBudget], dict[str, Any]]:
    """Character-level model; a source may have several references."""

    def recipe(statistics: CorpusStatistics, budget: TimeBudget) -> dict[str, Any]:
        by_task, pairs = "the task: letters to letters or phones", statistics.pairs
        letters = letters_of(statistics.target, pairs, by_task) if target == CHARACTERS else Chosen(target, by_task)
        tokens = {"source": letters_of(statistics.source, pairs, by_task), "target": letters, "shared": False}
        chosen = pairs_recipe(statistics, tokens, ["exact", rate], False, budget, monotonic=True)
        return {**chosen, "evaluation": {**chosen["evaluation"], "references": "by_source"}}

    return recipe


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


# Tasks whose network is the best that the time allows.
PAIRS: dict[str, Callable[[CorpusStatistics, TimeBudget], dict[str, Any]]] = {
    "translate": _translate,
    "pronounce": _spell({"kind": "words", "size": 1000}, "per"),
    "transliterate": _spell(CHARACTERS, "cer"),
    "inflect": inflect,
}
TEXTS: dict[str, Callable[[CorpusStatistics], dict[str, Any]]] = {
    "summarise": lambda statistics: _take_over(
        statistics, ["rouge1", "rouge2", "rougeL"], _reader(statistics), COVERAGE
    ),
    "answer": lambda statistics: _take_over(statistics, ["exact", "token_f1"], _reader(statistics), PLAIN),
    "converse": lambda statistics: _take_over(statistics, ["exact", "bleu"], _listener(statistics), PLAIN),
    "describe": lambda statistics: _take_over(statistics, ["chrf", "bleu"], _reader(statistics), PLAIN),
}
