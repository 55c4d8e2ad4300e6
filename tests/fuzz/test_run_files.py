"""Damaged files of a run: an error, or the outputs of the intact run, or a warning that says what is used instead."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import Outcome, fuzz, mutate_bytes

import transduce
from transduce.run import Run

LINES = ["red green", "blue white black red", "green", "purple red", "white " * 9]


def outputs(folder: Path) -> list[object]:
    """What the run answers, and the recipe, whose settings decide what it answers to other lines."""
    model = transduce.load(folder, device="cpu")
    return [*[(one.text, round(one.score, 3)) for one in model.generate(LINES)], model.recipe]


Damage = Callable[[random.Random], Outcome]


@pytest.fixture
def damage(attention_run: Path, tmp_path: Path) -> Callable[..., Damage]:
    """An attempt that damages one of these files of a copy of the run, loads the copy and restores the file."""

    def attempt_on(*patterns: str, finished: bool = True) -> Damage:
        folder = Path(shutil.copytree(attention_run, tmp_path / "run"))
        if not finished:  # the weights of an interrupted run are those of its best step
            shutil.rmtree(folder / "checkpoints" / "final")
            checkpoints = Run(folder).checkpoints
            first, last = checkpoints.steps()
            newest = checkpoints.load(last)
            best = {"step": first, "value": 0.0}
            checkpoints.save(last, newest.tensors, {**newest.state, "best": best})
            checkpoints.mark_best(**best)
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        contents = {file: file.read_bytes() for file in files}
        expected = outputs(folder)

        def attempt(draw: random.Random) -> Outcome:
            file = draw.choice(files)
            file.write_bytes(mutate_bytes(draw, contents[file]))
            try:
                with warnings.catch_warnings(record=True) as message:
                    warnings.simplefilter("always")
                    found = outputs(folder)
            finally:
                file.write_bytes(contents[file])
            if found == expected:
                return "equal"
            assert message, f"{file.name}: other outputs without a warning"
            return "warned"

        return attempt

    return attempt_on


def test_recipe(damage: Callable[..., Damage]) -> None:
    fuzz("recipe of a run", "recipe.yaml of a run", damage("recipe.yaml"), cases=40)


def test_tokenizers(damage: Callable[..., Damage]) -> None:
    fuzz("tokenizers of a run", "tokenizer files of a run", damage("tokenizer.*.json"), cases=40)


def test_checkpoint(damage: Callable[..., Damage]) -> None:
    files = damage("checkpoints/final/*", "checkpoints/best.json")
    fuzz("checkpoint", "weights, state and manifest of a finished run", files, cases=34)


def test_checkpoints_of_an_interrupted_run(damage: Callable[..., Damage]) -> None:
    files = damage("checkpoints/best.json", "checkpoints/step-*/*", finished=False)
    fuzz("interrupted run", "best.json and checkpoints of a run that is not finished", files, cases=34)


def test_metrics(attention_run: Path, tmp_path: Path) -> None:
    run = Run(tmp_path)
    content = (attention_run / "metrics.json").read_bytes()

    def attempt(draw: random.Random) -> Outcome:
        run.metrics_file.write_bytes(mutate_bytes(draw, content))
        assert isinstance(run.metrics(), dict)
        return "accepted"

    fuzz("metrics of a run", "metrics.json of a run", attempt, cases=40)
