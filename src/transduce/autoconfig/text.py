"""Recipes for text-to-text tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transduce.autoconfig.sizes import cosine, pieces_for, recurrent, training_for, transformer
from transduce.autoconfig.statistics import Look

CHARACTERS = {"kind": "chars", "size": 8000}
COVERAGE = {"kind": "attention_penalty", "penalty": "coverage", "weight": 0.3, "label_smoothing": 0.0}
PLAIN = {"kind": "cross_entropy", "label_smoothing": 0.0}


def _translate(seen: Look) -> dict[str, Any]:
    """Sentences: pieces of words and a Transformer."""
    kind = pieces_for(seen.pairs)
    tokens = {"source": kind, "target": kind, "shared": seen.shared}
    return {
        "tokens": tokens,
        "model": transformer(seen, tokens),
        "training": {**training_for(seen, True), "monitor": "bleu"},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["bleu", "chrf"]},
    }


def _spell(seen: Look, target: dict[str, Any], rate: str) -> dict[str, Any]:
    """Words: their letters, and recurrent networks with attention; several right answers stand on several lines."""
    return {
        "tokens": {"source": CHARACTERS, "target": target},
        "model": recurrent(seen),
        "training": {**training_for(seen, False), "monitor": rate},
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["exact", rate], "references": "by_source"},
    }


def _take_over(seen: Look, metrics: list[str], model: dict[str, Any], objective: dict[str, Any]) -> dict[str, Any]:
    """Answers made of what the source says: one vocabulary of words, of which rare ones are numbered and copied."""
    words = {"kind": "words", "size": 30_000, "min_count": 5 if seen.pairs >= 2000 else 2}
    an_epoch = max(1, int(seen.pairs * (seen.source.words + seen.target.words + 3) / 4096))
    steps = int(min(100_000, max(600, 20 * an_epoch)))
    check = max(50, min(1000, steps // 12))
    return {
        "tokens": {"source": words, "target": words, "shared": True, "oov_placeholders": 50},
        "model": {**model, "copy": {}},
        "training": {
            **cosine(steps, check, 4e-3 if seen.pairs < 20_000 else 2e-3),
            "batch_tokens": 4096,
            "objective": objective,
            "monitor": metrics[-1],
            "patience": 10,
        },
        "generation": {"beam": 5},
        "evaluation": {"metrics": metrics, "references": "by_source"},
    }


def _reader(seen: Look) -> dict[str, Any]:
    """Recurrent networks, whose attention finds one place at a time: what a summary or an answer is taken from."""
    width, dropout = (128, 0.1) if seen.pairs < 20_000 else (256, 0.2)
    part = {"kind": "recurrent", "cell": "gru", "width": width, "dropout": dropout}
    return {"encoder": part, "decoder": {**part, "context": {"kind": "luong", "input_feeding": False}}}


def _listener(seen: Look) -> dict[str, Any]:
    """A Transformer, which sees at once what was said in several turns, and what was not."""
    width, dropout = (64, 0.1) if seen.pairs < 20_000 else (256, 0.2)
    part = {"kind": "transformer", "width": width, "heads": 4, "ff_width": 2 * width, "dropout": dropout}
    return {"encoder": {**part, "layers": 2}, "decoder": {**part, "layers": 1}}


TEXTS: dict[str, Callable[[Look], dict[str, Any]]] = {
    "translate": _translate,
    "pronounce": lambda seen: _spell(seen, {"kind": "words", "size": 1000}, "per"),
    "transliterate": lambda seen: _spell(seen, CHARACTERS, "cer"),
    "inflect": lambda seen: _spell(seen, CHARACTERS, "cer"),
    "summarise": lambda seen: _take_over(seen, ["rouge1", "rouge2", "rougeL"], _reader(seen), COVERAGE),
    "answer": lambda seen: _take_over(seen, ["exact", "token_f1"], _reader(seen), PLAIN),
    "converse": lambda seen: _take_over(seen, ["exact", "bleu"], _listener(seen), PLAIN),
    "describe": lambda seen: _take_over(seen, ["chrf", "bleu"], _reader(seen), PLAIN),
}
