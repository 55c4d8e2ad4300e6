"""The kept recipe of the original Transformer: the sizes, the optimiser and the schedule of Vaswani et al. 2017."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transduce.recipe import load
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.optimisers import SCHEDULES

RECIPE = complete_recipe(load(Path(__file__).parents[2] / "recipes" / "wmt14" / "transformer.yaml"))


def test_it_has_the_parameters_of_the_base_model() -> None:
    """Table 3 of the paper: 65 million, with about 37,000 tokens for both sides."""
    with torch.device("meta"):
        model = build_model(RECIPE.model, 37_000, 37_000)
    d, ff, tokens = 512, 2048, 37_000
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * ff + d + ff, 2 * d
    encoder = 6 * (attention + feed_forward + 2 * norm)
    decoder = 6 * (2 * attention + feed_forward + 3 * norm)
    assert sum(one.numel() for one in model.parameters()) == encoder + decoder + tokens * d + tokens


@pytest.mark.parametrize("step", [1, 100, 4000, 4001, 100_000])
def test_its_learning_rate_is_that_of_equation_3(step: int) -> None:
    settings = RECIPE.training
    factor = SCHEDULES[settings.schedule.kind](step, settings.steps, settings.schedule)
    equation = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert settings.optimiser.learning_rate * factor == pytest.approx(equation, rel=1e-5)


def test_its_other_settings_are_those_of_the_paper() -> None:
    training, generation = RECIPE.training, RECIPE.generation
    assert (training.optimiser.kind, training.optimiser.betas, training.optimiser.eps) == ("adam", (0.9, 0.98), 1e-9)
    assert (training.steps, training.average_checkpoints) == (100_000, 5)
    assert (generation.beam, generation.length_penalty) == (4, 0.6)
    assert RECIPE.model.tie == "all"
