"""The kernels of training on a CPU: the same numbers as torch's, and a dropout that follows from torch's generator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from transduce.attention.scores import MLP
from transduce.layers.dropout import Dropout, add_dropped
from transduce.native.library import library
from transduce.objectives.smoothed import IGNORED, Smoothed

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")


@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([0.0, 0.1]), st.booleans(), st.integers(0, 99))
def test_cross_entropy_is_that_of_torch(rows: int, size: int, smoothing: float, narrow: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    kind = torch.bfloat16 if narrow else torch.float32
    scores = (torch.randn(rows, size, generator=draw) * 8).to(kind).requires_grad_()
    gold = torch.randint(0, size, (rows,), generator=draw)
    gold[torch.rand(rows, generator=draw) < 0.2] = IGNORED
    other = scores.detach().double().requires_grad_()
    smoothed, plain = Smoothed.apply(scores, gold, smoothing)
    (smoothed * 0.3).backward()
    expected = F.cross_entropy(other, gold, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORED)
    (expected * 0.3).backward()
    assert smoothed.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)
    assert plain.item() == pytest.approx(F.cross_entropy(other, gold, reduction="sum").item(), rel=1e-5, abs=1e-4)
    assert scores.grad is not None
    assert other.grad is not None
    assert torch.allclose(scores.grad.double(), other.grad, rtol=1e-2 if narrow else 1e-4, atol=1e-6)


def test_scores_that_are_no_numbers_are_told() -> None:
    for bad in (float("nan"), float("inf")):
        scores = torch.zeros(2, 40)
        scores[1, 7] = bad
        assert not torch.isfinite(Smoothed.apply(scores, torch.tensor([1, 2]), 0.1)[0])


@given(st.sampled_from([0.1, 0.5, 0.9]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_dropout_keeps_its_law(rate: float, narrow: bool, adds: bool, seed: int) -> None:
    """Kept numbers are x / (1 - p), as many as p says, and the gradient passes where they were kept."""
    torch.manual_seed(seed)
    kind = torch.bfloat16 if narrow else torch.float32
    changes = torch.full((100, 200), 2.0, dtype=kind, requires_grad=True)
    values = torch.full((100, 200), 5.0, requires_grad=True)
    layer = Dropout(rate).train()
    made = add_dropped(values, changes, layer) if adds else layer(changes)
    kept = made.detach().float() - (5 if adds else 0)
    share = (kept != 0).float().mean().item()
    assert share == pytest.approx(1 - rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)
    assert torch.allclose(kept[kept != 0], torch.tensor(2 / (1 - rate)), rtol=1e-2 if narrow else 1e-5)
    made.float().sum().backward()
    assert changes.grad is not None
    assert torch.allclose(changes.grad.float() * 2, kept, rtol=1e-2, atol=1e-6)
    assert not adds or (values.grad is not None and bool((values.grad == 1).all()))


def test_dropout_follows_from_the_generator() -> None:
    layer, values = Dropout(0.3).train(), torch.ones(50, 50)
    torch.manual_seed(4)
    first, second = layer(values), layer(values)
    torch.manual_seed(4)
    assert torch.equal(layer(values), first)
    assert not torch.equal(first, second)
    neighbours = ((first == 0)[:, 1:] & (first == 0)[:, :-1]).float().mean().item()
    assert neighbours == pytest.approx(0.09, abs=0.03)


def test_evaluation_and_double_precision_go_the_plain_way() -> None:
    values = torch.ones(4, 4)
    assert torch.equal(Dropout(0.5).eval()(values), values)
    torch.manual_seed(1)
    made = Dropout(0.5).train()(values.double())
    torch.manual_seed(1)
    assert torch.equal(made, F.dropout(values.double(), 0.5))


def test_without_kernels_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSDUCE_NATIVE", "0")
    values = torch.ones(8, 8)
    torch.manual_seed(1)
    made = add_dropped(values, values, Dropout(0.5).train())
    torch.manual_seed(1)
    assert torch.equal(made, values + F.dropout(values, 0.5))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_additive_scores_are_those_of_torch(sources: int, steps: int, rows: int, width: int, narrow: bool) -> None:
    torch.manual_seed(width)
    kind = torch.bfloat16 if narrow else torch.float32
    score = MLP(width, width)
    query, memory = torch.randn(sources, steps, width), torch.randn(sources, rows, width)
    other = MLP(width, width).double()
    other.load_state_dict(score.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        found = score(query, score.keys(memory))
    expected = other(query.double(), other.keys(memory.double()))  # in double precision the plain way is gone
    assert found.dtype == kind
    close = 0.06 if narrow else 1e-5
    assert torch.allclose(found.double(), expected, rtol=close, atol=close)
    slopes = torch.randn(found.shape)
    (found.float() * slopes).sum().backward()
    (expected * slopes.double()).sum().backward()
    for one, two in zip(score.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert float((one.grad - two.grad).norm()) <= close * float(two.grad.norm()) + close
