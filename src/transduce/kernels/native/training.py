"""Bindings of the native kernels of training: attention, additive attention, cross-entropy, dropout.

Each function takes the library, which its caller has looked up for the tensors (`dispatch.native_kernels`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ATTENTION_TENSORS = ("query", "keys", "values", "grad", "context", "query_grad", "keys_grad", "values_grad")
ATTENTION_SIZES = ("mask_stride", "bf16", "rows", "heads", "queries", "length", "width")


class _AttentionStruct(ctypes.Structure):
    """`ShortAttention` of attention.h"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ATTENTION_TENSORS),
        ("mask", ctypes.c_void_p),
        ("strides", (ctypes.c_int64 * 3) * len(ATTENTION_TENSORS)),
        *((name, ctypes.c_int64) for name in (*ATTENTION_SIZES, "causal", "threads")),
        ("scale", ctypes.c_double),
    ]


def attention_forward(
    kernels: ctypes.CDLL, parts: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """Queries (R H T K), keys and values (R H S K), each K contiguous; mask R 1 1 S -> context, R H T K."""
    context = _empty_heads(parts[0])
    _attention_call(kernels.transduce_attention_forward, {**_named(parts), "context": context}, mask, scale, causal)
    return context


def attention_backward(
    kernels: ctypes.CDLL, parts: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool, grad: Tensor
) -> list[Tensor]:
    """The gradients of queries, keys and values for that of the context."""
    results = [_empty_heads(part) for part in parts]
    given = {**_named(parts), "grad": grad, **dict(zip(ATTENTION_TENSORS[5:], results, strict=True))}
    _attention_call(kernels.transduce_attention_backward, given, mask, scale, causal)
    return results


def _named(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(ATTENTION_TENSORS[:3], parts, strict=True))


def _empty_heads(like: Tensor) -> Tensor:
    """R H T K where the heads of a row are adjacent, as the output projection reads them."""
    rows, heads, steps, width = like.shape
    return torch.empty(rows, steps, heads, width, dtype=like.dtype).transpose(1, 2)


def _attention_call(
    function: ctypes._NamedFuncPointer, given: dict[str, Tensor], mask: Tensor | None, scale: float, causal: bool
) -> None:
    task = _AttentionStruct(scale=scale, causal=causal, threads=torch.get_num_threads())
    for number, name in enumerate(ATTENTION_TENSORS):
        if name in given:
            setattr(task, name, given[name].data_ptr())
            task.strides[number][:] = given[name].stride()[:3]
    query = given["query"]
    task.rows, task.heads, task.queries, task.width = query.shape
    task.length, task.bf16 = given["keys"].size(2), query.dtype == torch.bfloat16
    if mask is not None:
        task.mask, task.mask_stride = mask.data_ptr(), mask.stride(0) if mask.size(0) > 1 else 0
    if function(ctypes.byref(task)):
        raise MemoryError("out of memory in attention")


ADDITIVE_POINTERS = ("query", "keys", "values", "grad", "vector", "mask", "weights")
ADDITIVE_RESULTS = ("context", "query_grad", "keys_grad", "values_grad", "vector_grad")
ADDITIVE_SIZES = (
    "sources",
    "queries",
    "length",
    "width",
    "value_width",
    "mask_stride",
    "bf16",
    "bf16_values",
    "threads",
)


class _AdditiveStruct(ctypes.Structure):
    """`AdditiveAttention` of additive_attention.h"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*ADDITIVE_POINTERS, *ADDITIVE_RESULTS)),
        *((name, ctypes.c_int64) for name in ADDITIVE_SIZES),
    ]


@dataclass(frozen=True)
class AdditiveInput:
    """Contiguous tensors; keys in the precision of the queries, the vector in fp32."""

    query: Tensor  # B N Q
    keys: Tensor  # B S Q
    values: Tensor  # B S D
    vector: Tensor  # Q
    mask: Tensor | None  # B 1 S or 1 1 S
    weights: Tensor  # B N S, fp32: written by `additive_context_forward`


def additive_context_forward(kernels: ctypes.CDLL, given: AdditiveInput) -> Tensor:
    """The context: B N D, in the precision of the queries."""
    context = given.query.new_empty(*given.query.shape[:2], given.values.size(2))
    _additive_call(kernels.transduce_additive_context_forward, given, {"context": context})
    return context


def additive_context_backward(
    kernels: ctypes.CDLL, given: AdditiveInput, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values and vector for that of the context."""
    query, keys, values = (torch.empty_like(one) for one in (given.query, given.keys, given.values))
    vectors = torch.empty(len(query), given.vector.numel())
    results = {"query_grad": query, "keys_grad": keys, "values_grad": values, "vector_grad": vectors}
    _additive_call(kernels.transduce_additive_context_backward, given, {"grad": grad, **results})
    return query, keys, values, vectors.sum(0)


def _additive_call(function: ctypes._NamedFuncPointer, given: AdditiveInput, more: dict[str, Tensor]) -> None:
    tensors = {name: getattr(given, name) for name in ("query", "keys", "values", "vector", "weights")} | more
    task = _AdditiveStruct(**{name: one.data_ptr() for name, one in tensors.items()})
    task.sources, task.queries, task.length = given.weights.shape
    task.width, task.value_width = given.keys.size(2), given.values.size(2)
    task.bf16, task.bf16_values = (one.dtype == torch.bfloat16 for one in (given.query, given.values))
    task.threads = torch.get_num_threads()
    if given.mask is not None:
        task.mask, task.mask_stride = given.mask.data_ptr(), given.mask.stride(0) if len(given.mask) > 1 else 0
    if function(ctypes.byref(task)):
        raise MemoryError("out of memory in attention")


def additive_scores_forward(kernels: ctypes.CDLL, query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
    """v . tanh(q + k) of queries (B N Q), keys (B S Q) and a vector (Q, fp32): B N S, fp32."""
    scores = torch.empty(*query.shape[:2], keys.size(1))
    bf16 = query.dtype == torch.bfloat16
    given = (query.data_ptr(), keys.data_ptr(), vector.data_ptr(), bf16, *scores.shape, keys.size(2))
    kernels.transduce_additive_scores_forward(*given, scores.data_ptr(), torch.get_num_threads())
    return scores


def additive_scores_backward(
    kernels: ctypes.CDLL, query: Tensor, keys: Tensor, vector: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and vector, in fp32, for those of the scores (B N S, fp32)."""
    results = tuple(torch.zeros(shape) for shape in (query.shape, keys.shape, keys.shape[::2]))
    bf16 = query.dtype == torch.bfloat16
    given = (query.data_ptr(), keys.data_ptr(), vector.data_ptr(), bf16, *grad.shape, keys.size(2))
    pointers = (one.data_ptr() for one in results)
    kernels.transduce_additive_scores_backward(*given, grad.data_ptr(), *pointers, torch.get_num_threads())
    return results[0], results[1], results[2].sum(0)


def cross_entropy_forward(
    kernels: ctypes.CDLL, logits: Tensor, labels: Tensor, lse: Tensor, nll: Tensor, uniform: Tensor
) -> None:
    """Writes log sum exp of each row of logits (M V), the loss of its label (M), and the mean loss over the
    vocabulary; 0 for padding."""
    pointers = (one.data_ptr() for one in (labels, lse, nll, uniform))
    shape = (*logits.shape, logits.stride(0))
    bf16 = logits.dtype == torch.bfloat16
    kernels.transduce_cross_entropy_forward(logits.data_ptr(), bf16, *shape, *pointers, torch.get_num_threads())


def cross_entropy_backward(
    kernels: ctypes.CDLL, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, smoothing: float, result: Tensor
) -> None:
    """Writes the gradient of the smoothed loss, times `grad` (1), into `result` (M V)."""
    pointers = (one.data_ptr() for one in (labels, lse, grad))
    given = (logits.data_ptr(), logits.dtype == torch.bfloat16, *logits.shape, logits.stride(0), *pointers, smoothing)
    kernels.transduce_cross_entropy_backward(*given, result.data_ptr(), torch.get_num_threads())


def dropout(
    kernels: ctypes.CDLL, residual: Tensor | None, x: Tensor, seed: Tensor, rate: float, result: Tensor
) -> None:
    """Writes residual + dropout(x); all are contiguous, the residual and a sum with it in fp32."""
    bf16, bf16_result = x.dtype == torch.bfloat16, result.dtype == torch.bfloat16
    given = (None if residual is None else residual.data_ptr(), x.data_ptr(), bf16, x.numel(), seed.data_ptr(), rate)
    kernels.transduce_dropout(*given, result.data_ptr(), bf16_result, torch.get_num_threads())
