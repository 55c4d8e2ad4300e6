"""A classifier of two inputs, on pairs of which neither input alone tells anything."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from transduce.autoconfig import recipe_for
from transduce.training.experiment import train

pytestmark = pytest.mark.slow

COLOURS, THINGS = ("red", "blue", "green", "white"), ("car", "house", "door", "coat")


def pairs(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Does the premise say what the hypothesis says? Whichever of the two is seen alone: as often yes as no."""
    chance, lines = random.Random(seed), []
    for _ in range(count):
        colour, thing = chance.choice(COLOURS), chance.choice(THINGS)
        other = chance.choice([one for one in COLOURS if one != colour])
        label = chance.choice(("yes", "no"))
        hypothesis = f"it is {colour if label == 'yes' else other}"
        lines.append((f"the {thing} over there is {colour}", hypothesis, label))
    return lines


def accuracy(folder: Path, lines: list[str], *more: str, task: str = "entail") -> float:
    folder.mkdir()
    for name, part in (("train", lines[:1600]), ("test", lines[1600:])):
        (folder / f"{name}.tsv").write_text("".join(f"{line}\n" for line in part))
    settings = [
        f"data.cache={folder / 'cache'}",
        f"data.dev={folder / 'test.tsv'}",
        "model.encoder.width=32",
        "model.encoder.dropout=0.1",
        "training.steps=150",
        "training.validate_every=50",
        "training.checkpoint_every=50",
        "training.optimiser.learning_rate=0.01",
        "evaluation.resamples=10",
        *more,
    ]
    trained = train(recipe_for(str(folder / "train.tsv"), settings, task), folder / "run")
    return trained.scores["dev"].scores["accuracy"].value


def test_both_inputs_are_needed(tmp_path):
    lines = pairs(2000, seed=1)
    assert accuracy(tmp_path / "both", ["\t".join(line) for line in lines]) >= 95
    for name, kept in (("premise", 0), ("hypothesis", 1)):
        alone = ["\t".join((line[kept], line[2])) for line in lines]
        assert 35 <= accuracy(tmp_path / name, alone, "training.steps=60", task="classify") <= 65
    blank = [f"\t{hypothesis}\t{label}" for _, hypothesis, label in lines]
    assert 35 <= accuracy(tmp_path / "blank", blank, "training.steps=60") <= 65
