"""Cross-entropy on a CPU: equal to torch, and the reuse of logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from transduce.kernels.cross_entropy import IGNORED, cross_entropy
from transduce.kernels.linear import output_projection
from transduce.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([0.0, 0.1]), st.booleans(), st.integers(0, 99))
def test_cross_entropy_equals_that_of_torch(rows: int, size: int, smoothing: float, bf16: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    scores = (torch.randn(rows, size, generator=draw) * 8).to(dtype).requires_grad_()
    labels = torch.randint(0, size, (rows,), generator=draw)
    labels[torch.rand(rows, generator=draw) < 0.2] = IGNORED
    other = scores.detach().double().requires_grad_()
    smoothed, plain = cross_entropy(scores, labels, smoothing)
    (smoothed * 0.3).backward()
    expected = F.cross_entropy(other, labels, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORED)
    (expected * 0.3).backward()
    assert smoothed.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)
    assert plain.item() == pytest.approx(F.cross_entropy(other, labels, reduction="sum").item(), rel=1e-5, abs=1e-4)
    assert scores.grad is not None
    assert other.grad is not None
    assert torch.allclose(scores.grad.double(), other.grad, rtol=1e-2 if bf16 else 1e-4, atol=1e-6)


def test_loss_of_non_finite_logits_is_not_finite() -> None:
    for bad in (float("nan"), float("inf")):
        scores = torch.zeros(2, 40)
        scores[1, 7] = bad
        assert not torch.isfinite(cross_entropy(scores, torch.tensor([1, 2]), 0.1)[0])


def test_the_gradient_overwrites_logits_of_a_linear_layer_once() -> None:
    torch.manual_seed(1)
    rows, layer, labels = torch.randn(6, 8), nn.Linear(8, 40), torch.tensor([1, 2, 3, IGNORED, 4, 39])
    cross_entropy(layer(rows), labels, 0.1)[0].backward()
    expected = [one.grad for one in layer.parameters()]
    layer.zero_grad()
    total = cross_entropy(scores := output_projection(layer, rows), labels, 0.1, reuse_logits=True)[0]
    before = scores.detach().clone()
    total.backward(retain_graph=True)
    assert not torch.equal(scores.detach(), before)
    for one, other in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(one.grad, other)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        total.backward()


def test_logits_that_another_backward_pass_needs_are_not_overwritten() -> None:
    rows, layer, labels = torch.randn(6, 8), nn.Linear(8, 40), torch.tensor([1, 2, 3, IGNORED, 4, 39])
    scores = output_projection(layer, rows).tanh()  # whose gradient is made from what it gave
    before = scores.detach().clone()
    cross_entropy(scores, labels, 0.1, reuse_logits=True)[0].backward()
    assert torch.equal(scores.detach(), before)
