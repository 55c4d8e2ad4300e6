"""What texts and lines of colours look like in, all sections of a recipe but `data` out."""

from __future__ import annotations

from typing import Any

from transduce.choose.look import Look
from transduce.choose.sizes import cosine

LONGEST = 4200  # pixels of the largest picture, and a little


def draw(seen: Look) -> dict[str, Any]:
    """A Transformer says one pixel after the other; where it is, its learned positions tell."""
    pixels = int(seen.target.words)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if seen.pairs >= 2000 else 1}
    width = 128 if seen.pairs < 20_000 else 256
    part = {"kind": "transformer", "width": width, "heads": 4, "hidden": 4 * width, "dropout": 0.1}
    steps = int(min(50_000, max(1_000, 20 * seen.pairs * pixels // 8192)))
    return {
        "tokens": {"source": words, "target": {"kind": "words", "size": 2000}},
        "model": {
            "encoder": {**part, "layers": 1},
            "decoder": {**part, "layers": 2, "position": {"kind": "learned", "longest": LONGEST}},
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
