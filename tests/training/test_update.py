"""Updates: micro-batches, out-of-memory splitting, asynchronous optimiser steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from training_fixtures import (
    TinyBatches,
    TinyModel,
    settings,
)

from transduce.contracts import Forward
from transduce.data.batching import DataPosition
from transduce.flow import Batch
from transduce.objectives import CrossEntropy, Loss
from transduce.recipe import parse
from transduce.training.distributed import Processes
from transduce.training.optimisers import build_optimiser, optimiser_state
from transduce.training.update import MicroBatch, Update, UpdateBatch, UpdateResult, split_batch

CPU = torch.device("cpu")


def update_of(model: nn.Module, objective: CrossEntropy | None = None, **changes: Any) -> Update:
    made = settings(optimiser={"kind": "sgd", "learning_rate": 1.0, "momentum": 0.0}, clip=None, **changes)
    optimiser = build_optimiser(made.optimiser, model)
    return Update(model, optimiser, objective or CrossEntropy(label_smoothing=0.1), made, Processes(), CPU)


def gradient_of_update(
    accumulate: int, objective: CrossEntropy | None = None, rows: int = 7
) -> tuple[dict[str, Tensor], UpdateResult]:
    """What one update of SGD with learning rate 1 subtracts from the weights: the gradient."""
    model = TinyModel().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = update_of(model, objective)
    batch = TinyBatches(rows).at(DataPosition())
    result = update(UpdateBatch(split_batch(batch, Processes(), accumulate), CrossEntropy().count(batch)), 1, 1.0)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, result


@trials(deadline=None, max_examples=15)
@given(st.integers(1, 9), st.integers(1, 9))
def test_micro_batches_have_the_gradient_of_the_whole_batch(rows: int, accumulate: int) -> None:
    whole, result = gradient_of_update(1, rows=rows)
    parts, other = gradient_of_update(accumulate, rows=rows)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-6, atol=1e-6)
    assert other.loss == pytest.approx(result.loss)
    assert other.count == result.count
    assert other.gradient_norm == pytest.approx(result.gradient_norm)


def test_gradient_is_that_of_the_mean_over_real_tokens() -> None:
    gradients, result = gradient_of_update(3)
    model = TinyModel().double()
    batch = TinyBatches(7).at(DataPosition())
    logits = model(batch).logits.flatten(0, 1)
    gold = batch.labels.values.masked_fill(~batch.labels.mask, -1).flatten()
    loss = nn.functional.cross_entropy(logits, gold, ignore_index=-1, label_smoothing=0.1)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
    assert result.loss / result.count == pytest.approx(float(loss.detach()), rel=1e-6)


class LimitedMemory(CrossEntropy):
    """Simulates a device with memory for few rows: more fail in the forward pass, or half-way through the backward."""

    def __init__(self, rows: int, when: str, never: int = -1) -> None:
        super().__init__(label_smoothing=0.1)
        self.rows, self.when, self.never, self.calls = rows, when, never, 0

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        self.calls += 1
        if batch.size <= self.rows and self.never not in batch.rows:
            return super().__call__(model, batch)
        if self.when == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        assert isinstance(model, TinyModel)
        # By then the gradient of the output layer is computed, that of the layer before is not.
        hook = model.mix.register_forward_hook(fail_in_backward)
        try:
            return super().__call__(model, batch)
        finally:
            hook.remove()


def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(raise_out_of_memory)


def raise_out_of_memory(gradient: Tensor) -> None:
    raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("fits", [1, 2, 3, 6])
def test_out_of_memory_splits_the_batch_and_keeps_the_gradient(when: str, fits: int) -> None:
    whole, expected = gradient_of_update(1)
    parts, result = gradient_of_update(2, LimitedMemory(fits, when))
    assert result.loss == pytest.approx(expected.loss)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-6, atol=1e-6)
    assert (result.splits > 0) == (fits < 4)
    assert not result.dropped


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_row_that_does_not_fit_alone_is_dropped_and_reported(when: str) -> None:
    parts, result = gradient_of_update(1, LimitedMemory(7, when, never=4))
    assert result.dropped == (4,)
    rest = torch.tensor([0, 1, 2, 3, 5, 6])
    model = TinyModel().double()
    batch = TinyBatches(7).at(DataPosition()).select(rest)
    objective = CrossEntropy(label_smoothing=0.1)
    loss = objective(model, batch)
    (loss.total / objective.count(batch)).backward()
    assert result.count == objective.count(batch)
    assert result.loss == pytest.approx(loss.total.item())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parts[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_size_that_failed_is_not_tried_again() -> None:
    model, objective = TinyModel(), LimitedMemory(3, "forward")
    update = update_of(model, objective)
    batch = TinyBatches(8).at(DataPosition())
    update_batch = UpdateBatch(split_batch(batch, Processes(), 1), CrossEntropy().count(batch))
    assert update(update_batch, 1, 0.1).splits > 0
    objective.calls = 0
    assert update(update_batch, 2, 0.1).splits == 0
    assert objective.calls <= 4


def test_other_runtime_errors_are_raised() -> None:
    class Broken(CrossEntropy):
        def __call__(self, model: Forward, batch: Batch) -> Loss:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        gradient_of_update(1, Broken())


class NanObjective(CrossEntropy):
    """The loss of the third batch is NaN."""

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        loss = super().__call__(model, batch)
        third = torch.equal(batch.labels.values, TinyBatches().at(DataPosition(0, 3)).labels.values)
        return Loss(loss.total * float("nan"), loss.parts) if third else loss


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("clip", [0.5, 1e3, None])  # always, never, not at all
def test_asynchronous_updates_give_the_same_weights(
    kind: str, nonfinite: bool, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for asynchronous in (False, True):
        monkeypatch.setattr(Update, "asynchronous", property(lambda self, value=asynchronous: value))
        options = parse({"training": {"optimiser": {"kind": kind}, "clip": clip}}).training
        model, batches = TinyModel(), TinyBatches()
        optimiser = build_optimiser(options.optimiser, model)
        objective = NanObjective() if nonfinite else CrossEntropy()
        update = Update(model, optimiser, objective, options, Processes(), CPU)
        skipped = []
        for step in range(1, 7):
            batch = batches.at(DataPosition(0, step))
            result = update(UpdateBatch([MicroBatch(0, batch)], objective.count(batch)), step, 0.01)
            skipped += [step] if result.nonfinite else []
        results.append((model.state_dict(), optimiser_state(optimiser, model), skipped))
    (weights, moments, skipped), (other_weights, other_moments, other_skipped) = results
    assert skipped == other_skipped == ([3] if nonfinite else [])
    # With clipping, one multiplies by a factor and the other divides by its inverse.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if clip == 0.5 else {"rtol": 0, "atol": 0}
    assert_close(other_weights, weights, **tolerance)
    assert_close(other_moments, moments, **tolerance)
