"""Recipes for images: captions, labels, visual questions, image generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transduce.autoconfig.sizes import cosine
from transduce.autoconfig.statistics import CorpusStatistics

SIDE = 64  # pixels of a side
IMAGE = {"kind": "image", "size": SIDE}
CELLS = {"kind": "cnn_grid", "channels": 32, "stages": 3}


def _training(statistics: CorpusStatistics, epochs: int, monitor: str) -> dict[str, Any]:
    """Batches of 64 pictures; small sets are seen more often."""
    steps = int(min(60_000, max(400, epochs * statistics.pairs / 64)))
    check = max(25, min(1000, steps // 12))
    return {
        **cosine(steps, check, 1e-3),
        "batch_tokens": 64 * (SIDE + 2 + int(statistics.target.words)),
        "objective": {"label_smoothing": 0.0},
        "monitor": monitor,
        "patience": 6,
    }


def _classify(statistics: CorpusStatistics) -> dict[str, Any]:
    """One label: a Transformer over the cells of a small convolutional network, which needs fewer pictures than
    patches do (Xiao 2021)."""
    encoder = {
        "kind": "transformer",
        "width": 128,
        "layers": 3,
        "heads": 4,
        "ff_width": 256,
        "activation": "gelu",
        "position": "none",
        "front": CELLS,
    }
    return {
        "tokens": {"target": {"kind": "labels"}},
        "model": {"encoder": encoder, "head": {"kind": "classifier", "pooling": "mean", "activation": "none"}},
        "training": _training(statistics, 15, "accuracy"),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "macro_f1"]},
    }


def _caption(statistics: CorpusStatistics) -> dict[str, Any]:
    """A sentence: the cells of a convolutional network, read by a recurrent decoder with soft attention (Xu 2015)."""
    rare = 5 if statistics.pairs >= 20_000 else 2 if statistics.pairs >= 5_000 else 1
    return {
        "tokens": {"target": {"kind": "words", "size": 10_000, "min_count": rare}},
        "model": {
            "encoder": {"kind": "identity", "width": 256, "dropout": 0.2, "front": CELLS},
            "decoder": {"kind": "recurrent", "cell": "gru", "width": 256, "context": "bahdanau", "dropout": 0.2},
        },
        "training": _training(statistics, 20, "bleu"),
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["bleu", "bleu1", "cider", "exact"], "references": "by_source"},
    }


PICTURES: dict[str, Callable[[CorpusStatistics], dict[str, Any]]] = {"caption": _caption, "classify-images": _classify}
PICTURED: dict[str, dict[str, Any]] = {task: {"sources": {"picture": IMAGE}} for task in PICTURES}


QUESTION_SOURCES = {"sources": {"picture": {"kind": "image", "size": 64}, "question": {"kind": "text"}}}


def ask(statistics: CorpusStatistics) -> dict[str, Any]:
    """Cells of a convolutional network and the words of a question in one memory, and a decoder that looks at both."""
    width, dropout = (128, 0.1) if statistics.pairs < 50_000 else (256, 0.1)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if statistics.pairs >= 2000 else 1}
    an_epoch = max(1, statistics.pairs // 64)
    steps = int(min(100_000, max(1_500, 40 * an_epoch)))
    check = max(50, min(1000, steps // 15))
    part = {"width": width, "dropout": dropout}
    return {
        "tokens": {"source": words, "target": words},
        "model": {
            "encoder": {
                "kind": "multi_source",
                "width": width,
                "parts": {
                    "picture": {"kind": "identity", **part, "front": {"kind": "cnn_grid", "stages": 3, "channels": 32}},
                    "question": {"kind": "recurrent", "cell": "gru", **part},
                },
            },
            "decoder": {"kind": "transformer", **part, "layers": 2, "heads": 4, "ff_width": 2 * width},
        },
        "training": {
            **cosine(steps, check, 1e-3),
            "batch_tokens": 64 * (64 + 12),  # a picture counts its rows of pixels
            "objective": {"label_smoothing": 0.0},
            "monitor": "exact",
            "patience": 15,
        },
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["exact", "token_f1"]},
    }


LONGEST = 4200  # pixels of the largest picture, and a little


def draw(statistics: CorpusStatistics) -> dict[str, Any]:
    """A Transformer says one pixel after the other; where it is, its learned positions tell."""
    pixels = int(statistics.target.words)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if statistics.pairs >= 2000 else 1}
    width = 128 if statistics.pairs < 20_000 else 256
    part = {"kind": "transformer", "width": width, "heads": 4, "ff_width": 4 * width, "dropout": 0.1}
    steps = int(min(50_000, max(1_000, 20 * statistics.pairs * pixels // 8192)))
    return {
        "tokens": {"source": words, "target": {"kind": "words", "size": 2000}},
        "model": {
            "encoder": {**part, "layers": 1},
            "decoder": {**part, "layers": 2, "position": {"kind": "learned", "max_positions": LONGEST}},
        },
        "training": {
            **cosine(steps, max(50, min(1000, steps // 15)), 1e-3),
            "batch_tokens": 8192,
            "objective": {"label_smoothing": 0.0},
            "validate_examples": 100,
            "patience": 15,
        },
        # A picture is as long as it is, however short its text.
        "generation": {"strategy": "greedy", "max_length": pixels + 1, "max_ratio": float(pixels)},
        "evaluation": {"metrics": ["wer"]},
    }
