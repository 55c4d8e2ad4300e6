"""Scheduled sampling: growth of the sampling rate, also in a resumed run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_fixtures import TinyBatches, TinyModel, settings

from transduce.contracts import Forward
from transduce.errors import InputError
from transduce.flow import Batch
from transduce.objectives import CrossEntropy, Loss, Objective, ScheduledSampling
from transduce.recipe.build import complete_objective
from transduce.training.checkpoint import CheckpointManager
from transduce.training.trainer import train


def rates(steps: int, **options: object) -> list[float]:
    objective = ScheduledSampling(**options)  # type: ignore[arg-type]
    return [objective.at_step(step, steps).rate for step in range(1, steps + 1)]


def test_linear_growth_of_the_sampling_rate() -> None:
    assert rates(4, rate=0.4, schedule="linear") == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates(4, rate=0.4, schedule="linear", warmup_ratio=0.5) == pytest.approx([0.2, 0.4, 0.4, 0.4])
    assert rates(3, rate=0.4) == [0.4, 0.4, 0.4]


@given(st.integers(20, 10_000), st.floats(0.1, 1))
def test_inverse_sigmoid_growth_equals_the_formula_of_the_paper(steps: int, warmup_ratio: float) -> None:
    """1 - k / (k + exp(i / k)) for one k at every update, half-way in the middle of `warmup_ratio`."""
    objective = ScheduledSampling(rate=1.0, schedule="sigmoid", warmup_ratio=warmup_ratio)
    middle = max(warmup_ratio * steps / 2, 1.0)
    low, high = 1.0, 1e6  # the oracle finds k by halving
    for _ in range(200):
        k = (low + high) / 2
        low, high = (k, high) if k * math.log(k) < middle else (low, k)
    for step in (1, steps // 3, steps // 2, steps):
        power = step / k
        expected = 1 - k / (k + math.exp(power)) if power < 600 else 1.0
        assert objective.at_step(step, steps).rate == pytest.approx(expected, abs=1e-6)


@given(st.sampled_from(["linear", "sigmoid"]), st.integers(1, 300), st.floats(0, 1), st.floats(0.05, 1))
def test_the_sampling_rate_grows_up_to_its_limit(schedule: str, steps: int, rate: float, warmup_ratio: float) -> None:
    found = rates(steps, rate=rate, schedule=schedule, warmup_ratio=warmup_ratio)
    assert all(0 <= one <= other <= rate + 1e-12 for one, other in itertools.pairwise(found))


class RecordingObjective(CrossEntropy):
    """Records the steps of `at_step`, which returns another objective."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []

    def at_step(self, step: int, steps: int) -> Objective:
        self.steps.append((step, steps))
        return ObjectiveOfStep()


class ObjectiveOfStep(CrossEntropy):
    seen = 0

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        ObjectiveOfStep.seen += 1
        return super().__call__(model, batch)


def test_training_uses_the_objective_of_each_update(tmp_path: Path) -> None:
    ObjectiveOfStep.seen, diary = 0, RecordingObjective()
    for steps in (3, 5):  # the second goes on
        train(
            TinyModel(), TinyBatches(), settings(steps=steps), checkpoints=CheckpointManager(tmp_path), objective=diary
        )
    assert diary.steps == [(1, 3), (2, 3), (3, 3), (4, 5), (5, 5)]
    assert ObjectiveOfStep.seen == 5


@pytest.mark.parametrize("options", [{"schedule": "fast"}, {"warmup_ratio": 0.0}, {"warmup_ratio": 1.5}])
def test_invalid_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        complete_objective({"kind": "scheduled_sampling", **options}, "recipe")
