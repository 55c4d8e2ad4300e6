"""What pairs of pictures and texts look like in, all sections of a recipe but `data` out, for each task on pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transduce.choose.look import Look
from transduce.choose.sizes import cosine

SIDE = 64  # pixels of a side
IMAGE = {"kind": "image", "size": SIDE}
CELLS = {"kind": "grid", "channels": 32, "stages": 3}


def _training(seen: Look, epochs: int, monitor: str) -> dict[str, Any]:
    """Batches of 64 pictures; small sets are seen more often."""
    steps = int(min(60_000, max(400, epochs * seen.pairs / 64)))
    check = max(25, min(1000, steps // 12))
    return {
        **cosine(steps, check, 1e-3),
        "batch_tokens": 64 * (SIDE + 2 + int(seen.target.words)),
        "objective": {"label_smoothing": 0.0},
        "monitor": monitor,
        "patience": 6,
    }


def _classify(seen: Look) -> dict[str, Any]:
    """One label: a Transformer over the cells of a small convolutional network, which needs fewer pictures than
    patches do (Xiao 2021)."""
    encoder = {
        "kind": "transformer",
        "width": 128,
        "layers": 3,
        "heads": 4,
        "hidden": 256,
        "activation": "gelu",
        "position": "none",
        "front": CELLS,
    }
    return {
        "tokens": {"target": {"kind": "labels"}},
        "model": {"encoder": encoder, "head": {"kind": "classifier", "pooling": "mean", "activation": "none"}},
        "training": _training(seen, 15, "accuracy"),
        "generation": {"strategy": "greedy"},
        "evaluation": {"metrics": ["accuracy", "macro_f1"]},
    }


def _caption(seen: Look) -> dict[str, Any]:
    """A sentence: the cells of a convolutional network, read by a recurrent decoder with soft attention (Xu 2015)."""
    rare = 5 if seen.pairs >= 20_000 else 2 if seen.pairs >= 5_000 else 1
    return {
        "tokens": {"target": {"kind": "words", "size": 10_000, "min_count": rare}},
        "model": {
            "encoder": {"kind": "plain", "width": 256, "dropout": 0.2, "front": CELLS},
            "decoder": {"kind": "recurrent", "cell": "gru", "width": 256, "reader": "bahdanau", "dropout": 0.2},
        },
        "training": _training(seen, 20, "bleu"),
        "generation": {"beam": 5},
        "evaluation": {"metrics": ["bleu", "bleu1", "cider", "exact"], "references": "by_source"},
    }


PICTURES: dict[str, Callable[[Look], dict[str, Any]]] = {"caption": _caption, "classify-images": _classify}
PICTURED: dict[str, dict[str, Any]] = {task: {"sources": {"picture": IMAGE}} for task in PICTURES}
