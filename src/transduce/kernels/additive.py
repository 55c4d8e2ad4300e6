"""Queries and keys in, scores or contexts of additive attention out, in training on a CPU by one kernel each way.

Written with torch's operations, each step of a decoder makes five tensors of B S Q numbers, forward and backward. The
kernel keeps none: tanh is made again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transduce.kernels.native.additive import Reading, read_memory, read_memory_slopes
from transduce.kernels.native.training import kernels_for, meet, part


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


class _Read(torch.autograd.Function):
    """Scores, softmax and the mean of the values; only the weights are kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, vector: Tensor, mask: Tensor | None) -> Tensor:
        kernels = kernels_for(query, keys, values, vector)
        assert kernels is not None
        weights = torch.empty(*query.shape[:2], keys.size(1))
        ctx.save_for_backward(query, keys, values, vector, mask, weights)
        return read_memory(kernels, Reading(query, keys, values, vector, mask, weights))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, vector, mask, weights = ctx.saved_tensors
        kernels = kernels_for(query, keys, values, vector)
        assert kernels is not None
        given, slopes = Reading(query, keys, values, vector, mask, weights), grads[0].to(query.dtype).contiguous()
        one, two, three, last = read_memory_slopes(kernels, given, slopes)
        return one, two, three, last.view_as(vector), None


def reads(keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether all of the attention is one kernel, if `meets` says so too: a mask that is the same for all steps."""
    plain = mask is None or (mask.dtype == torch.bool and mask.dim() == 3 and mask.size(1) == 1 and mask.stride(2) == 1)
    same = values.dtype == keys.dtype or (keys.dtype == torch.bfloat16 and values.dtype == torch.float32)
    shaped = values.dim() == 3 and values.shape[:2] == keys.shape[:2] and values.is_contiguous() and values.numel() > 0
    return plain and same and shaped and torch.is_grad_enabled() and kernels_for(keys, values) is not None


def additive_contexts(query: Tensor, keys: Tensor, values: Tensor, vector: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(v . tanh(q + k)) values: B N D."""
    contexts: Tensor = _Read.apply(query, keys, values, vector, mask)
    return contexts
