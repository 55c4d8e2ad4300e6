"""What questions about pictures look like in, all sections of a recipe but `data` out."""

from __future__ import annotations

from typing import Any

from transduce.choose.look import Look
from transduce.choose.sizes import cosine

ASKED = {"sources": {"picture": {"kind": "image", "size": 64}, "question": {"kind": "text"}}}


def ask(seen: Look) -> dict[str, Any]:
    """Cells of a convolutional network and the words of a question in one memory, and a decoder that looks at both."""
    width, dropout = (128, 0.1) if seen.pairs < 50_000 else (256, 0.1)
    words = {"kind": "words", "size": 30_000, "min_count": 2 if seen.pairs >= 2000 else 1}
    an_epoch = max(1, seen.pairs // 64)
    steps = int(min(100_000, max(1_500, 40 * an_epoch)))
    check = max(50, min(1000, steps // 15))
    part = {"width": width, "dropout": dropout}
    return {
        "tokens": {"source": words, "target": words},
        "model": {
            "encoder": {
                "kind": "joined",
                "width": width,
                "parts": {
                    "picture": {"kind": "plain", **part, "front": {"kind": "grid", "stages": 3, "channels": 32}},
                    "question": {"kind": "recurrent", "cell": "gru", **part},
                },
            },
            "decoder": {"kind": "transformer", **part, "layers": 2, "heads": 4, "hidden": 2 * width},
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
