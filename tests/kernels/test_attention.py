"""Attention over short rows in training on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from transduce.kernels.attention import AttentionInput, accepts_native, native_attention
from transduce.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.booleans(),
    st.sampled_from(["all", "some", "causal"]),
)  # fmt: skip
def test_native_attention_equals_that_of_torch(
    rows: int, heads: int, steps: int, slots: int, width: int, bf16: bool, seen: str
) -> None:
    torch.manual_seed(slots)
    dtype, slots = torch.bfloat16 if bf16 else torch.float32, steps if seen == "causal" else slots
    joint = [torch.randn(rows, size, heads, width).to(dtype) for size in (steps, slots, slots)]
    parts = [one.transpose(1, 2).detach().requires_grad_() for one in joint]  # as projections leave them
    mask = torch.rand(rows, 1, 1, slots) > 0.4 if seen == "some" else None
    if mask is not None:
        mask[..., -1] = True
    given_input = AttentionInput(*parts, mask, None, 0.3, seen == "causal", 0.0)
    assert accepts_native(given_input)
    found = native_attention(given_input)
    others = [part.detach().double().requires_grad_() for part in parts]
    expected = F.scaled_dot_product_attention(*others, mask, is_causal=seen == "causal", scale=0.3)
    grad = torch.randn(found.shape)
    (found.float() * grad).sum().backward()
    (expected * grad.double()).sum().backward()
    tolerance = 0.03 if bf16 else 1e-5
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    for part, other in zip(parts, others, strict=True):
        assert part.grad is not None
        assert other.grad is not None
        assert torch.allclose(
            part.grad.double(), other.grad, rtol=tolerance, atol=tolerance * (1 + other.grad.abs().max())
        )


def test_a_fully_masked_row_has_context_zero_and_nan_propagates() -> None:
    query, keys, values = (torch.randn(2, 1, 3, 8).requires_grad_() for _ in range(3))
    mask = torch.tensor([[True, True, True], [False, False, False]])[:, None, None]
    found = native_attention(AttentionInput(query, keys, values, mask, None, 1.0, False, 0.0))
    found.sum().backward()
    assert bool((found[1] == 0).all())
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())
    bad = query.detach().clone()
    bad[0, 0, 1, 2] = torch.nan
    assert not native_attention(AttentionInput(bad, keys, values, mask, None, 1.0, False, 0.0)).isfinite().all()
