"""Contrastive, graded and CTC losses against torch, the formula and the sum over all paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import Tensor

from transduce.flow import BOS, EOS, PAD, SIMILARITY, Batch, Padded
from transduce.model import PairEmbeddings
from transduce.objectives import Contrastive, CoSENT, CosineRegression, ctc_loss


def giving(source: Tensor, target: Tensor) -> Callable[[Batch], PairEmbeddings]:
    """A model that gives these vectors, whatever it reads."""
    return lambda batch: PairEmbeddings(source, target)


def different(rows: int) -> Batch:
    """Pairs of texts that are all different."""
    sources, targets = [[4 + row, EOS] for row in range(rows)], [[BOS, 4 + row, EOS] for row in range(rows)]
    return Batch(Padded.from_rows(sources), Padded.from_rows(targets))


@trials(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.floats(0.05, 2), st.booleans(), st.integers(0, 99))
def test_contrastive_loss_equals_its_formula(rows: int, temperature: float, symmetric: bool, seed: int) -> None:
    torch.manual_seed(seed)
    one, other = torch.randn(2, rows, 5)
    objective = Contrastive(temperature=temperature, symmetric=symmetric)
    loss = objective(giving(one, other), different(rows))
    fit = F.cosine_similarity(one[:, None].double(), other[None].double(), dim=-1) / temperature
    forth = F.cross_entropy(fit, torch.arange(rows)).item()
    back = F.cross_entropy(fit.T, torch.arange(rows)).item()
    expected = (forth + back) / 2 if symmetric else forth
    assert loss.total.item() / rows == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert objective.count(different(rows)) == rows
    assert loss.parts["right"] == sum(int(line.argmax()) == number for number, line in enumerate(fit))


def graded(golds: list[float]) -> Batch:
    values = torch.tensor(golds).view(-1, 1, 1)
    return replace(
        different(len(golds)), extra={SIMILARITY: Padded(values, torch.ones(len(golds), 1, dtype=torch.bool))}
    )


def graded_formula(kind: str, one: np.ndarray, other: np.ndarray, golds: list[float]) -> float:
    """The loss of a batch, pair by pair."""
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(one, other, strict=True)]
    if kind == "cosine_regression":
        return sum((cosine - gold / 5) ** 2 for cosine, gold in zip(cosines, golds, strict=True))
    pairs = list(zip(cosines, golds, strict=True))
    ordered = [np.exp(20 * (low - high)) for high, more in pairs for low, less in pairs if more > less]
    return len(pairs) * float(np.log1p(sum(ordered)))


@pytest.mark.parametrize("objective", [CosineRegression(), CoSENT()], ids=["cosine_regression", "cosent"])
@pytest.mark.parametrize("golds", [[3.0], [0.0, 5.0, 2.5, 2.5], [1.0, 1.0]])
def test_graded_losses_equal_their_formulas_and_finite_differences(objective, golds: list[float]) -> None:
    kind = "cosent" if isinstance(objective, CoSENT) else "cosine_regression"
    torch.manual_seed(len(golds))
    one, other = torch.randn(2, len(golds), 4)
    one.requires_grad_()
    loss = objective(giving(one, other), graded(golds))
    vectors = [side.detach().double().numpy() for side in (one, other)]
    assert loss.total.item() == pytest.approx(graded_formula(kind, *vectors, golds), rel=1e-4, abs=1e-6)
    loss.total.backward()
    step = np.zeros_like(vectors[0])
    step[0, 1] = 1e-5
    above, below = (graded_formula(kind, vectors[0] + sign * step, vectors[1], golds) for sign in (1, -1))
    assert one.grad is not None
    assert one.grad[0, 1].item() == pytest.approx((above - below) / 2e-5, rel=1e-3, abs=1e-5)
    assert objective.count(graded(golds)) == len(golds)


def test_graded_losses_are_zero_where_cosines_agree() -> None:
    one = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    other = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    for objective in (CosineRegression(), CoSENT(scale=40.0)):
        found = objective(giving(one, other), graded([5.0, 0.0]))
        assert found.total < 1e-6
        assert found.parts["error"] < 1e-6


def test_contrastive_loss_of_aligned_pairs_is_zero() -> None:
    summaries = torch.eye(4)
    # The length of a vector does not matter.
    found = Contrastive(temperature=0.01)(giving(summaries, 3 * summaries), different(4))
    assert found.total < 1e-6
    assert found.parts["right"] == 4


def test_equal_texts_are_not_negatives() -> None:
    """Two pairs with the same target are not negatives of each other, whatever their vectors."""
    one, other = torch.randn(2, 3, 5)
    twins = Batch(Padded.from_rows([[4, 2], [5, 2], [6, 2]]), Padded.from_rows([[1, 7, 2], [1, 7, 2], [1, 8, 9, 2]]))
    loss = Contrastive(temperature=0.5, symmetric=False)(giving(one, other), twins)
    fit = F.cosine_similarity(one[:, None], other[None], dim=-1) / 0.5
    rivals = [[0, 2], [1, 2], [0, 1, 2]]
    direct = sum(fit[row, own].logsumexp(0) - fit[row, row] for row, own in enumerate(rivals))
    torch.testing.assert_close(loss.total, direct)


def test_ctc_loss_equals_that_of_torch_and_the_sum_over_all_paths() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 5, 4, requires_grad=True)
    mask = torch.arange(5) < torch.tensor([5, 4, 3])[:, None]
    target = Padded.from_rows([[1, 2], [3, 3], [2]])
    loss = ctc_loss(logits.log_softmax(-1), mask.sum(1), target)
    direct = 0.0
    for row, (scores, real) in enumerate(zip(logits.detach().double(), mask.sum(1).tolist(), strict=True)):
        wanted = target.values[row][target.mask[row]].tolist()
        probabilities = scores.softmax(-1)
        paths = (p for p in product(range(4), repeat=real) if [k for k, _ in groupby(p) if k != PAD] == wanted)
        chance = sum(float(torch.stack([probabilities[i, k] for i, k in enumerate(path)]).prod()) for path in paths)
        direct -= float(torch.tensor(chance).log())
    assert loss.total.item() == pytest.approx(direct, rel=1e-4)
    reference = F.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1), target.values, mask.sum(1), target.mask.sum(1), reduction="sum"
    )
    torch.testing.assert_close(loss.total, reference)
    assert loss.parts["impossible"] == 0
    slices = [
        ctc_loss(logits.log_softmax(-1)[rows], mask[rows].sum(1), target.select(rows)).total
        for rows in torch.arange(3).split(1)
    ]
    torch.testing.assert_close(sum(slices), loss.total)


def test_ctc_reports_targets_that_are_too_long() -> None:
    logits = torch.randn(3, 3, 4, requires_grad=True)
    target = Padded.from_rows([[1, 1, 1], [1, 2, 3], [1, 1]])
    loss = ctc_loss(logits.log_softmax(-1), torch.full((3,), 3), target)
    assert loss.parts["impossible"] == 1
    loss.total.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[0].any()
    assert logits.grad[1:].any()
