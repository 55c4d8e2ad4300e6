"""What the tests of the whole line share: pairs, a recipe for seconds, and a command called as a shell would."""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transduce.cli import main

COLOURS = ("red", "green", "blue", "black", "white")
RECURRENT = {"kind": "recurrent", "width": 32, "dropout": 0.0}
TRANSFORMER = {
    "kind": "transformer",
    "width": 16,
    "layers": 1,
    "heads": 2,
    "ff_width": 32,
    "position": {"kind": "learned", "max_positions": 48},
}


def colour_pairs(count: int, seed: int = 1) -> list[tuple[str, str]]:
    """`red blue` -> `BLUE RED`: the right alignment is known."""
    draw = random.Random(seed)
    sources = [[draw.choice(COLOURS) for _ in range(draw.randint(2, 5))] for _ in range(count)]
    return [(" ".join(words), " ".join(word.upper() for word in reversed(words))) for words in sources]


@dataclass(frozen=True)
class Called:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


Command = Callable[..., Called]


def call(*arguments: str | Path, stdin: bytes = b"") -> Called:
    """One command in this process, from its arguments to its exit code, its streams true bytes."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    streams = {"stdin": io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"), "stdout": out, "stderr": err}
    code: Any = 0
    with warnings.catch_warnings(), patch.multiple(sys, argv=["transduce", *map(str, arguments)], **streams):
        try:
            main()
        except SystemExit as end:
            code = end.code
    written = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Called(code or 0, *written)


def settings(pairs: Path, model: dict[str, Any], kind: str, **training: Any) -> dict[str, Any]:
    """A recipe for a few seconds of training."""
    return {
        "data": {"train": str(pairs), "dev_size": 20, "max_length": 47},
        "tokens": {"source": {"kind": kind}, "target": {"kind": kind}},
        "model": model,
        "training": {
            "batch_tokens": 512,
            "optimiser": {"learning_rate": 0.01},
            "schedule": {"kind": "cosine", "warmup": 20},
            "validate_every": 100,
            "checkpoint_every": 100,
            "objective": {"label_smoothing": 0.0},
            **training,
        },
        "generation": {"max_source_length": 40, "max_length": 60},
        "evaluation": {"metrics": ["exact", "wer"], "resamples": 20},
    }
