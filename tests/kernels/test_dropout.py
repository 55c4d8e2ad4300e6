"""Dropout on a CPU: scaling, gradients, and a mask that follows from the random generator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from transduce.kernels.add_norm import dropout_add
from transduce.kernels.native.library import library
from transduce.layers.feed_forward import Dropout

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@given(st.sampled_from([0.1, 0.5, 0.9]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_dropout_scales_kept_numbers_and_their_gradients(rate: float, bf16: bool, adds: bool, seed: int) -> None:
    """Kept numbers are x / (1 - p), as many as p says, and the gradient passes where they were kept."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if bf16 else torch.float32
    changes = torch.full((100, 200), 2.0, dtype=dtype, requires_grad=True)
    values = torch.full((100, 200), 5.0, requires_grad=True)
    layer = Dropout(rate).train()
    made = dropout_add(values, changes, rate) if adds else layer(changes)
    kept = made.detach().float() - (5 if adds else 0)
    share = (kept != 0).float().mean().item()
    assert share == pytest.approx(1 - rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)
    assert torch.allclose(kept[kept != 0], torch.tensor(2 / (1 - rate)), rtol=1e-2 if bf16 else 1e-5)
    made.float().sum().backward()
    assert changes.grad is not None
    assert torch.allclose(changes.grad.float() * 2, kept, rtol=1e-2, atol=1e-6)
    assert not adds or (values.grad is not None and bool((values.grad == 1).all()))


def test_dropout_mask_follows_from_the_random_generator() -> None:
    layer, values = Dropout(0.3).train(), torch.ones(50, 50)
    torch.manual_seed(4)
    first, second = layer(values), layer(values)
    torch.manual_seed(4)
    assert torch.equal(layer(values), first)
    assert not torch.equal(first, second)
    neighbours = ((first == 0)[:, 1:] & (first == 0)[:, :-1]).float().mean().item()
    assert neighbours == pytest.approx(0.09, abs=0.03)


def test_evaluation_and_double_precision_use_torch() -> None:
    values = torch.ones(4, 4)
    assert torch.equal(Dropout(0.5).eval()(values), values)
    torch.manual_seed(1)
    made = Dropout(0.5).train()(values.double())
    torch.manual_seed(1)
    assert torch.equal(made, F.dropout(values.double(), 0.5))


def test_without_native_kernels_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSDUCE_NATIVE", "0")
    values = torch.ones(8, 8)
    torch.manual_seed(1)
    made = dropout_add(values, values, 0.5)
    torch.manual_seed(1)
    assert torch.equal(made, values + F.dropout(values, 0.5))
