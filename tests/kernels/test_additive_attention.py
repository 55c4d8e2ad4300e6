"""Additive attention in training on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.attention.multihead import Attend
from transduce.attention.scores import MLP, Softmax
from transduce.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_additive_scores_equal_those_of_torch(sources: int, steps: int, rows: int, width: int, bf16: bool) -> None:
    torch.manual_seed(width)
    dtype = torch.bfloat16 if bf16 else torch.float32
    score = MLP(width, width)
    query, memory = torch.randn(sources, steps, width), torch.randn(sources, rows, width)
    other = MLP(width, width).double()
    other.load_state_dict(score.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = score(query, score.keys(memory))
    expected = other(query.double(), other.keys(memory.double()))  # in double precision the plain way is gone
    assert found.dtype == dtype
    tolerance = 0.06 if bf16 else 1e-5
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(found.shape)
    (found.float() * grad).sum().backward()
    (expected * grad.double()).sum().backward()
    for one, two in zip(score.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert float((one.grad - two.grad).norm()) <= tolerance * float(two.grad.norm()) + tolerance


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans())
def test_fused_additive_context_equals_scores_softmax_and_product(
    sources: int, steps: int, slots: int, width: int, bf16: bool, masked: bool
) -> None:
    torch.manual_seed(width)
    attend = Attend(MLP(width, width + 1), Softmax(), carries_past=True)
    query, memory = torch.randn(sources, steps, width), torch.randn(sources, slots, width + 1, requires_grad=True)
    mask = torch.rand(sources, 1, slots) > 0.4 if masked else torch.ones(1, 1, slots, dtype=torch.bool)
    mask[..., 0] = True
    found, grad = [], torch.randn(sources, steps, width + 1)
    for with_attention in (False, True):  # told weights go the plain way
        query.grad = memory.grad = None
        attend.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            context, weights = attend(query, attend.keys(memory), memory, mask, with_attention=with_attention)
        assert (weights is not None) == with_attention
        (context.float() * grad).sum().backward()
        grads = [one.grad for one in (memory, *attend.parameters()) if one.grad is not None]
        found.append([context.detach().float(), *grads])
    tolerance = 0.1 if bf16 else 1e-5
    assert len(found[0]) == len(found[1]) == 6
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= tolerance * float(other.norm()) + tolerance
