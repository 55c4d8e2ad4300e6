"""Queries and keys in, the scores of additive attention out, in training on a CPU by one kernel each way.

Written with torch's operations, each step of a decoder makes five tensors of B S Q numbers, forward and backward. The
kernel keeps none: tanh is made again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transduce.native.training import kernels_for, meet, part


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
        kernels = kernels_for(query, keys, vector)
        assert kernels is not None
        ctx.save_for_backward(query, keys, vector)
        return meet(kernels, query, keys, vector).to(query.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, vector = ctx.saved_tensors
        kernels = kernels_for(query, keys, vector)
        assert kernels is not None
        one, other, last = part(kernels, query, keys, vector, grads[0].float().contiguous())
        return one.to(query.dtype), other.to(keys.dtype), last.view_as(vector)


def meets(query: Tensor, keys: Tensor, vector: Tensor) -> bool:
    """Whether the kernel takes them: B N Q and B S Q, whole and in one precision, the vector in fp32."""
    shaped = query.dim() == keys.dim() == 3 and len(query) == len(keys) and query.dtype == keys.dtype
    whole = all(one.is_contiguous() for one in (query, keys, vector)) and vector.dtype == torch.float32
    return shaped and whole and torch.is_grad_enabled() and kernels_for(query, keys, vector) is not None


def additive_scores(query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
    """v . tanh(q + k): B N S."""
    scores: Tensor = _Meet.apply(query, keys, vector)
    return scores
