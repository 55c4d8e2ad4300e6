"""Objectives: the sums they give, against torch and against the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import Tensor
from training_standins import TinyBatches, TinyModel

from transduce.data.batching import Position
from transduce.flow import Batch, Padded, State, Step
from transduce.training.objectives import OBJECTIVES, CrossEntropy, Model


def saying(logits: Tensor) -> Model:
    return lambda batch: Step(logits, State({}, {}))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Batch, Tensor]:
    rows = draw(st.lists(st.lists(st.integers(3, 8), min_size=2, max_size=6), min_size=1, max_size=4))
    target = Padded.from_rows(rows)
    torch.manual_seed(draw(st.integers(0, 1000)))
    return Batch(target=target), 3 * torch.randn(len(rows), target.values.size(1) - 1, 9)


@trials(deadline=None)
@given(cases(), st.sampled_from([0.0, 0.1, 0.5]))
def test_cross_entropy_is_torchs_and_the_formulas(case: tuple[Batch, Tensor], smoothing: float) -> None:
    batch, logits = case
    logits.requires_grad_()
    loss = CrossEntropy(label_smoothing=smoothing)(saying(logits), batch)
    (own,) = torch.autograd.grad(loss.total, logits)
    gold = batch.gold.values.masked_fill(~batch.gold.mask, -1)
    expected = F.cross_entropy(
        logits.flatten(0, 1), gold.flatten(), ignore_index=-1, label_smoothing=smoothing, reduction="sum"
    )
    (reference,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(own, reference)
    direct = 0.0
    for row, column in batch.gold.mask.nonzero().tolist():
        scores = logits[row, column].detach().double().log_softmax(-1)
        direct += float((1 - smoothing) * -scores[gold[row, column]] + smoothing * -scores.mean())
    # Single precision: the error is as large as the rounding of the largest logit, however small the loss.
    assert loss.total.item() == pytest.approx(direct, rel=1e-5, abs=1e-5)
    assert loss.count == sum(int(part) for part in batch.gold.mask.sum(1))
    plain = CrossEntropy()(saying(logits), batch)
    torch.testing.assert_close(loss.parts["nll"], plain.total)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_is_a_sum_over_rows(name: str) -> None:
    """The contract that lets slices, processes and retries add up."""
    objective, model = OBJECTIVES[name](), TinyModel()
    batch = TinyBatches(7).at(Position())
    whole = objective(model, batch)
    low, high = (objective(model, batch.select(rows)) for rows in torch.arange(7).split([3, 4]))
    torch.testing.assert_close(low.total + high.total, whole.total)
    assert low.count + high.count == whole.count == objective.count(batch)
    assert set(whole.parts) == set(objective.parts)
    for part in objective.parts:
        torch.testing.assert_close(low.parts[part] + high.parts[part], whole.parts[part])


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    batch = TinyBatches(4).at(Position())
    model = TinyModel()
    logits = model(batch).logits
    exact, half = (CrossEntropy()(saying(x), batch).total for x in (logits.bfloat16().float(), logits.bfloat16()))
    assert exact.dtype == half.dtype == torch.float32
    torch.testing.assert_close(half, exact)
