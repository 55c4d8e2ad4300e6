"""Bindings of the C kernels for additive attention (additive_attention.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

POINTERS = ("query", "keys", "values", "grad", "vector", "mask", "weights")
RESULTS = ("context", "query_grad", "keys_grad", "values_grad", "vector_grad")
NUMBERS = ("sources", "queries", "length", "width", "value_width", "mask_stride", "bf16", "bf16_values", "threads")


class _Arguments(ctypes.Structure):
    """AdditiveAttention in additive_attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*POINTERS, *RESULTS)),
        *((name, ctypes.c_int64) for name in NUMBERS),
    ]


@dataclass(frozen=True)
class AdditiveAttention:
    """Contiguous tensors; keys in the precision of the queries, the vector in fp32."""

    query: Tensor  # B N Q
    keys: Tensor  # B S Q
    values: Tensor  # B S D
    vector: Tensor  # Q
    mask: Tensor | None  # B 1 S or 1 1 S
    weights: Tensor  # B N S, fp32: written by `context_forward`


def context_forward(kernels: ctypes.CDLL, given: AdditiveAttention) -> Tensor:
    """The context: B N D, in the precision of the queries."""
    context = given.query.new_empty(*given.query.shape[:2], given.values.size(2))
    _call(kernels.transduce_additive_context_forward, given, {"context": context})
    return context


def context_backward(
    kernels: ctypes.CDLL, given: AdditiveAttention, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values and vector for that of the context."""
    query, keys, values = (torch.empty_like(one) for one in (given.query, given.keys, given.values))
    vectors = torch.empty(len(query), given.vector.numel())
    results = {"query_grad": query, "keys_grad": keys, "values_grad": values, "vector_grad": vectors}
    _call(kernels.transduce_additive_context_backward, given, {"grad": grad, **results})
    return query, keys, values, vectors.sum(0)


def _call(function: ctypes._NamedFuncPointer, given: AdditiveAttention, more: dict[str, Tensor]) -> None:
    tensors = {name: getattr(given, name) for name in ("query", "keys", "values", "vector", "weights")} | more
    task = _Arguments(**{name: one.data_ptr() for name, one in tensors.items()})
    task.sources, task.queries, task.length = given.weights.shape
    task.width, task.value_width = given.keys.size(2), given.values.size(2)
    task.bf16, task.bf16_values = (one.dtype == torch.bfloat16 for one in (given.query, given.values))
    task.threads = torch.get_num_threads()
    if given.mask is not None:
        task.mask, task.mask_stride = given.mask.data_ptr(), given.mask.stride(0) if len(given.mask) > 1 else 0
    if function(ctypes.byref(task)):
        raise MemoryError("not enough memory for attention")


def scores_forward(kernels: ctypes.CDLL, query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
    """v . tanh(q + k) of queries (B N Q), keys (B S Q) and a vector (Q, fp32): B N S, fp32."""
    scores = torch.empty(*query.shape[:2], keys.size(1))
    bf16 = query.dtype == torch.bfloat16
    given = (query.data_ptr(), keys.data_ptr(), vector.data_ptr(), bf16, *scores.shape, keys.size(2))
    kernels.transduce_additive_scores_forward(*given, scores.data_ptr(), torch.get_num_threads())
    return scores


def scores_backward(
    kernels: ctypes.CDLL, query: Tensor, keys: Tensor, vector: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and vector, in fp32, for those of the scores (B N S, fp32)."""
    results = tuple(torch.zeros(shape) for shape in (query.shape, keys.shape, keys.shape[::2]))
    bf16 = query.dtype == torch.bfloat16
    given = (query.data_ptr(), keys.data_ptr(), vector.data_ptr(), bf16, *grad.shape, keys.size(2))
    pointers = (one.data_ptr() for one in results)
    kernels.transduce_additive_scores_backward(*given, grad.data_ptr(), *pointers, torch.get_num_threads())
    return results[0], results[1], results[2].sum(0)
