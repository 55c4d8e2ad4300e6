"""Runs of seconds for the studio: checkpoints of one training, pictures with a bright square, sung digits."""

from __future__ import annotations

import fcntl
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_fixtures import RECURRENT, colour_pairs, settings

import transduce
from transduce.synthetic import write_files

COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "white": (250, 250, 250)}
CELL, CELLS = 8, 4  # pixels of a cell, cells of a side


@pytest.fixture(scope="session")
def history_run(shared_folder: Path) -> Path:
    return _once(shared_folder, train_with_checkpoints)


@pytest.fixture(scope="session")
def squares_run(shared_folder: Path) -> Path:
    return _once(shared_folder, train_on_squares)


@pytest.fixture(scope="session")
def recordings_run(shared_folder: Path) -> Path:
    return _once(shared_folder, train_on_recordings)


def _once(shared_folder: Path, train: Callable[[Path], Path]) -> Path:
    """A run that the first worker that needs it trains; all workers read it."""
    folder = shared_folder / "studio" / train.__name__
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            train(folder)
    return folder / "run"


def train_with_checkpoints(folder: Path) -> Path:
    """A recurrent network with attention that learns to reverse, and keeps six checkpoints."""
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{target}\n" for source, target in colour_pairs(300)), encoding="utf-8")
    model = {"encoder": RECURRENT, "decoder": {**RECURRENT, "context": "luong"}}
    schedule = {
        "steps": 120,
        "checkpoint_every": 20,
        "validate_every": 20,
        "keep": 6,
        "log_every": 10,
        "validate_examples": 4,
    }
    recipe = settings(pairs, model, "words", **schedule)
    transduce.train(recipe, folder / "run")
    return folder / "run"


def draw_square(path: Path, colour: str, cell: int) -> None:
    """A picture that is dark but for one cell, counted in reading order."""
    picture = Image.new("RGB", (CELL * CELLS, CELL * CELLS), (20, 20, 20))
    row, column = divmod(cell, CELLS)
    box = (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL)
    picture.paste(COLOURS[colour], box)
    picture.save(path)


def train_on_squares(folder: Path) -> Path:
    """A decoder that must look at the square to name its colour: encoder rows know nothing of each other."""
    draw, lines = random.Random(1), []
    for number in range(160):
        colour, cell = draw.choice(list(COLOURS)), draw.randrange(CELLS * CELLS)
        draw_square(folder / f"{number}.png", colour, cell)
        lines.append(f"{number}.png\t{colour} square\n")
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    front = {"kind": "patches", "patch_size": CELL}
    model = {
        "encoder": {"kind": "identity", "width": 32, "dropout": 0.0, "front": front},
        "decoder": {"kind": "recurrent", "width": 32, "context": "bahdanau", "dropout": 0.0},
    }
    picture = {"kind": "image", "size": CELL * CELLS}
    return _train_media(folder, model, {"picture": picture}, steps=150)


def train_on_recordings(folder: Path) -> Path:
    """A Transformer over recordings of sung digits, hardly trained."""
    write_files("sung-digits", folder, 12, 1)
    part = {"kind": "transformer", "width": 16, "layers": 1, "heads": 2, "dropout": 0.0}
    model = {"encoder": {**part, "front": {"kind": "conv_subsampling"}}, "decoder": part}
    return _train_media(folder, model, {"sound": {"kind": "audio", "mels": 20}}, steps=3)


def _train_media(folder: Path, model: dict[str, Any], sources: dict[str, Any], steps: int) -> Path:
    recipe = {
        "data": {"train": str(folder / "pairs.tsv"), "sources": sources, "dev_size": 4, "cache": str(folder / "cache")},
        "tokens": {"target": {"kind": "words"}},
        "model": model,
        "training": {
            "steps": steps,
            "batch_tokens": 2048,
            "optimiser": {"learning_rate": 0.01},
            "schedule": {"kind": "cosine", "warmup": 5},
            "objective": {"label_smoothing": 0.0},
            "validate_every": steps,
            "checkpoint_every": steps,
        },
        "generation": {"strategy": "greedy", "max_length": 12},
        "evaluation": {"metrics": ["exact"], "resamples": 10},
    }
    transduce.train(recipe, folder / "run")
    return folder / "run"
