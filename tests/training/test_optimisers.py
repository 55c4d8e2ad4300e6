"""Optimisers and schedules against closed forms and torch; optimiser state."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from training_fixtures import TinyBatches, TinyModel

from transduce.data.batching import DataPosition
from transduce.objectives import CrossEntropy
from transduce.recipe import OptimiserRecipe, ScheduleRecipe
from transduce.training.optimisers import (
    SCHEDULES,
    FusedAdam,
    Plateau,
    build_optimiser,
    decay_end,
    load_optimiser_state,
    optimiser_state,
    schedule_factor,
    set_learning_rate,
)

KINDS = ("adamw", "adam", "sgd")


def steps_of(model: TinyModel, optimiser: torch.optim.Optimizer, first: int, last: int) -> None:
    for index in range(first, last):
        CrossEntropy()(model, TinyBatches().at(DataPosition(0, index))).total.backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_equals_the_textbook_formula(kind: str) -> None:
    settings = OptimiserRecipe(kind=kind, learning_rate=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)  # type: ignore[arg-type]
    model = torch.nn.Linear(3, 2)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    model(torch.ones(1, 3)).square().sum().backward()
    build_optimiser(settings, model).step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient, old = parameter.grad.double(), before[name]
        decay = 0.2 if name == "weight" else 0.0  # the bias is not decayed
        if kind == "adamw":  # bias correction makes the first step gradient / |gradient|
            new = old * (1 - 0.1 * decay) - 0.1 * gradient / (gradient.abs() + 1e-6)
        elif kind == "adam":
            gradient = gradient + decay * old
            new = old - 0.1 * gradient / (gradient.abs() + 1e-6)
        else:
            new = old - 0.1 * (gradient + decay * old)
        torch.testing.assert_close(parameter.double(), new, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "reference"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_the_fused_step_equals_that_of_torch_to_the_bit(kind: str, reference: type[torch.optim.Optimizer]) -> None:
    model, copy = TinyModel(), TinyModel()
    copy.load_state_dict(model.state_dict())
    settings = OptimiserRecipe(kind=kind, learning_rate=0.1, betas=(0.8, 0.9), weight_decay=0.01)
    ours = build_optimiser(settings, model)
    assert isinstance(ours, FusedAdam)
    groups = [
        {"params": [p for p in copy.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in copy.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = reference(groups, lr=0.1, betas=(0.8, 0.9), eps=settings.eps, fused=True)
    for step in range(4):
        for number, (mine, other) in enumerate(zip(model.parameters(), copy.parameters(), strict=True)):
            mine.grad = other.grad = None if (step + number) % 3 == 0 else torch.randn_like(mine)
        ours.step()
        theirs.step()
        for mine, other in zip(model.parameters(), copy.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.slow
def test_an_optimiser_does_not_import_the_compiler_of_torch() -> None:
    code = """
import sys
from torch import nn
from transduce.recipe import OptimiserRecipe
from transduce.training.optimisers import build_optimiser, load_optimiser_state, optimiser_state
model = nn.Linear(2, 2)
optimiser = build_optimiser(OptimiserRecipe(), model)
model.weight.grad = model.weight.detach()
optimiser.step()
optimiser.zero_grad()
load_optimiser_state(optimiser, model, optimiser_state(optimiser, model))
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_weight_decay_applies_to_matrices_only() -> None:
    model = TinyModel()
    optimiser = build_optimiser(OptimiserRecipe(weight_decay=0.5), model)
    decayed = {id(p) for group in optimiser.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == {"embedding.weight", "mix.weight"}
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimiser_state_continues_bit_for_bit(kind: str) -> None:
    settings = OptimiserRecipe(kind=kind)  # type: ignore[arg-type]
    whole, broken = TinyModel(), TinyModel()
    steps_of(whole, build_optimiser(settings, whole), 0, 6)
    optimiser = build_optimiser(settings, broken)
    steps_of(broken, optimiser, 0, 3)
    memory = {name: tensor.clone() for name, tensor in optimiser_state(optimiser, broken).items()}
    second = build_optimiser(settings, broken)
    load_optimiser_state(second, broken, memory)
    steps_of(broken, second, 3, 6)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, broken.state_dict()[name]), name


def shares(kind: str, steps: int, **options: float) -> list[float]:
    settings = ScheduleRecipe(kind=kind, **options)  # type: ignore[arg-type]
    return [schedule_factor(step, steps, settings, Plateau()) for step in range(1, steps + 1)]


def test_inverse_sqrt_schedule_equals_its_closed_form() -> None:
    values = shares("inverse_sqrt", 100, warmup=16)
    assert values[15] == 1.0 == max(values)
    assert values[7] == 0.5
    assert values[63] == pytest.approx(0.5)  # four times the warm-up: half
    for step, value in enumerate(values, 1):
        assert value == pytest.approx(16**0.5 * min(step**-0.5, step * 16**-1.5))  # Vaswani et al. 2017


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedules_equal_those_of_torch(kind: str) -> None:
    """Without warm-up; torch counts from 0, where no update was made yet."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if kind == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=20, eta_min=0.1)
    elif kind == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, total_iters=20)
    else:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimiser, 1.0)
    for value in shares(kind, 20, warmup=0, floor=0.1):
        optimiser.step()
        scheduler.step()
        assert value == pytest.approx(scheduler.get_last_lr()[0])


@trials(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 40), st.integers(1, 80), st.floats(0, 0.9))
def test_schedules_warm_up_and_stay_between_zero_and_one(kind: str, warmup: int, steps: int, floor: float) -> None:
    values = shares(kind, steps, warmup=warmup, floor=floor)
    assert all(0 <= value <= 1 for value in values)
    for step, value in enumerate(values[:warmup], 1):
        assert value == pytest.approx(step / warmup)
    if kind in ("cosine", "linear", "warmup_stable_decay") and steps > warmup:
        assert values[-1] == pytest.approx(floor)


def test_warmup_stable_decay_is_constant_and_then_falls_as_one_minus_the_square_root() -> None:
    values = shares("warmup_stable_decay", 100, warmup=10, decay=0.25)
    assert values[9:75] == [1.0] * 66
    assert values[75:] == pytest.approx([1 - (number / 25) ** 0.5 for number in range(1, 26)])
    settings = ScheduleRecipe(kind="warmup_stable_decay", decay=0.25)
    assert decay_end(75, settings) == 100  # the decay is a quarter of all updates
    assert decay_end(1, settings) == 2


@trials(deadline=None)
@given(st.lists(st.floats(0, 10) | st.just(math.nan), max_size=30), st.booleans(), st.integers(0, 3))
def test_plateau_schedule_equals_that_of_torch(values: list[float], lower: bool, patience: int) -> None:
    settings = ScheduleRecipe(kind="plateau", factor=0.5, patience=patience, floor=0.1)
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, "min" if lower else "max", 0.5, patience, threshold=0.0, min_lr=0.1, eps=0.0
    )
    plateau = Plateau()
    for value in values:
        plateau = Plateau.from_json(json.loads(json.dumps(plateau.after(value, settings, lower).to_json())))
        reference.step(value)
        assert plateau.factor == pytest.approx(optimiser.param_groups[0]["lr"])


def test_learning_rate_is_set_in_every_group() -> None:
    optimiser = build_optimiser(OptimiserRecipe(weight_decay=0.1), TinyModel())
    set_learning_rate(optimiser, 0.25)
    assert [group["lr"] for group in optimiser.param_groups] == [0.25, 0.25]
