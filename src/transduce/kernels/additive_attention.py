"""Additive attention (Bahdanau 2015) in training: scores alone, or scores, softmax and context together.

Written with torch's operations, each step of a decoder stores five tensors of B S Q numbers, forward and backward. The
C kernels store none of them: tanh is computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.kernels.dispatch import Backend, Operation, is_plain_linear, native_kernels
from transduce.kernels.native import training as native
from transduce.kernels.native.training import AdditiveInput


def additive_scores_reference(query: Tensor, keys: Tensor, layer: nn.Module) -> Tensor:
    """v . tanh(q + k), v the weights of a linear layer with one output: ... N Q, ... S Q -> ... N S"""
    scores: Tensor = layer(torch.tanh(query.unsqueeze(-2) + keys.unsqueeze(-3))).squeeze(-1)
    return scores


def additive_context_reference(
    query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None
) -> Tensor:
    """softmax(v . tanh(q + k)) values: ... N D"""
    scores = additive_scores_reference(query, keys, layer)
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ values


class _AdditiveScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
        kernels = native_kernels(query, keys, vector)
        assert kernels is not None
        ctx.save_for_backward(query, keys, vector)
        return native.additive_scores_forward(kernels, query, keys, vector).to(query.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, vector = ctx.saved_tensors
        kernels = native_kernels(query, keys, vector)
        assert kernels is not None
        results = native.additive_scores_backward(kernels, query, keys, vector, grads[0].float().contiguous())
        return results[0].to(query.dtype), results[1].to(keys.dtype), results[2].view_as(vector)


class _AdditiveContext(torch.autograd.Function):
    """Only the attention weights are stored."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, vector: Tensor, mask: Tensor | None) -> Tensor:
        kernels = native_kernels(query, keys, values, vector)
        assert kernels is not None
        weights = torch.empty(*query.shape[:2], keys.size(1))
        ctx.save_for_backward(query, keys, values, vector, mask, weights)
        return native.additive_context_forward(kernels, AdditiveInput(query, keys, values, vector, mask, weights))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, vector, mask, weights = ctx.saved_tensors
        kernels = native_kernels(query, keys, values, vector)
        assert kernels is not None
        given = AdditiveInput(query, keys, values, vector, mask, weights)
        *results, for_vector = native.additive_context_backward(kernels, given, grads[0].to(query.dtype).contiguous())
        return *results, for_vector.view_as(vector), None


def accepts_scores(query: Tensor, keys: Tensor, layer: nn.Module) -> bool:
    """B N Q and B S Q, contiguous and in one precision, the vector in fp32, in training on a CPU."""
    if not torch.is_grad_enabled() or not is_plain_linear(layer):
        return False
    vector: Any = layer.weight
    shaped = query.dim() == keys.dim() == 3 and len(query) == len(keys) and query.dtype == keys.dtype
    contiguous = all(one.is_contiguous() for one in (query, keys, vector)) and vector.dtype == torch.float32
    return shaped and contiguous and native_kernels(query, keys, vector) is not None


def accepts_context(query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None) -> bool:
    """As `accepts_scores`, with a mask that is the same for all queries of a source."""
    if not accepts_scores(query, keys, layer):
        return False
    masks = mask is None or (mask.dtype == torch.bool and mask.dim() == 3 and mask.size(1) == 1 and mask.stride(2) == 1)
    same = values.dtype == keys.dtype or (keys.dtype == torch.bfloat16 and values.dtype == torch.float32)
    shaped = values.dim() == 3 and values.shape[:2] == keys.shape[:2] and values.is_contiguous() and values.numel() > 0
    return masks and same and shaped and native_kernels(values) is not None


def native_scores(query: Tensor, keys: Tensor, layer: nn.Module) -> Tensor:
    scores: Tensor = _AdditiveScores.apply(query, keys, layer.weight)
    return scores


def native_context(query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None) -> Tensor:
    context: Tensor = _AdditiveContext.apply(query, keys, values, layer.weight, mask)
    return context


ADDITIVE_SCORES = Operation(
    "additive_scores", additive_scores_reference, (Backend("native", accepts_scores, native_scores),)
)
ADDITIVE_CONTEXT = Operation(
    "additive_context", additive_context_reference, (Backend("native", accepts_context, native_context),)
)


def additive_scores(query: Tensor, keys: Tensor, layer: nn.Module) -> Tensor:
    """v . tanh(q + k), v the weights of a linear layer with one output: ... N Q, ... S Q -> ... N S"""
    scores: Tensor = ADDITIVE_SCORES(query, keys, layer)
    return scores


def additive_context(query: Tensor, keys: Tensor, values: Tensor, layer: nn.Module, mask: Tensor | None) -> Tensor:
    """softmax(v . tanh(q + k)) values: ... N D; mask: broadcastable to ... N S"""
    context: Tensor = ADDITIVE_CONTEXT(query, keys, values, layer, mask)
    return context
