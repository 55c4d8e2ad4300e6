"""The whole line in small: pairs, three trained runs, and the command line called as a shell would call it."""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import transduce
from transduce.cli import main

COLOURS = ("red", "green", "blue", "black", "white")
RECURRENT = {"kind": "recurrent", "width": 32, "dropout": 0.0}
TRANSFORMER = {
    "kind": "transformer",
    "width": 16,
    "layers": 1,
    "heads": 2,
    "hidden": 32,
    "position": {"kind": "learned", "longest": 48},
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


@pytest.fixture(scope="session")
def command() -> Command:
    return call


@pytest.fixture(scope="session", autouse=True)
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for all of it; nothing is kept in the user's own cache."""
    folder = tmp_path_factory.mktemp("line")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patched.setenv("COLUMNS", "200")
        yield folder


@pytest.fixture(scope="session")
def pairs(bench: Path) -> Path:
    path = bench / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(400)), encoding="utf-8")
    return path


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
            "label_smoothing": 0.0,
            **training,
        },
        "generation": {"max_source": 40, "max_length": 60},
        "evaluation": {"metrics": ["exact", "wer"], "resamples": 20},
    }


@pytest.fixture(scope="session")
def attention_run(bench: Path, pairs: Path) -> Path:
    """Two recurrent networks with attention over words, trained until they know the task."""
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "reader": "luong"}}
    transduce.train(settings(pairs, model, "words", steps=200), bench / "attention")
    return bench / "attention"


@pytest.fixture(scope="session")
def transformer_run(bench: Path, pairs: Path) -> Path:
    """A Transformer over characters whose positions end at 48."""
    model = {"encoder": TRANSFORMER, "decoder": TRANSFORMER}
    transduce.train(settings(pairs, model, "chars", steps=40), bench / "transformer")
    return bench / "transformer"


@pytest.fixture(scope="session")
def bottleneck_run(bench: Path, pairs: Path) -> Path:
    """No attention: all the decoder knows came through one vector."""
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "reader": "start"}}
    transduce.train(settings(pairs, model, "words", steps=20), bench / "bottleneck")
    return bench / "bottleneck"


@pytest.fixture(scope="session")
def model(attention_run: Path) -> transduce.Model:
    return transduce.load(attention_run)
