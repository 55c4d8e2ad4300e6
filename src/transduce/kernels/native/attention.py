"""Bindings of the C kernels for attention over short rows (attention.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

TENSORS = ("query", "keys", "values", "grad", "context", "query_grad", "keys_grad", "values_grad")
SHAPE = ("mask_stride", "bf16", "rows", "heads", "queries", "length", "width")


class _Arguments(ctypes.Structure):
    """ShortAttention in attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        ("mask", ctypes.c_void_p),
        ("strides", (ctypes.c_int64 * 3) * len(TENSORS)),
        *((name, ctypes.c_int64) for name in (*SHAPE, "causal", "threads")),
        ("scale", ctypes.c_double),
    ]


def attention_forward(
    kernels: ctypes.CDLL, parts: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """Queries (R H T K), keys and values (R H S K), each K contiguous; mask R 1 1 S -> context, R H T K."""
    context = _empty_heads(parts[0])
    _call(kernels.transduce_attention_forward, {**_named(parts), "context": context}, mask, scale, causal)
    return context


def attention_backward(
    kernels: ctypes.CDLL, parts: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool, grad: Tensor
) -> list[Tensor]:
    """The gradients of queries, keys and values for that of the context."""
    results = [_empty_heads(part) for part in parts]
    given = {**_named(parts), "grad": grad, **dict(zip(TENSORS[5:], results, strict=True))}
    _call(kernels.transduce_attention_backward, given, mask, scale, causal)
    return results


def _named(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(TENSORS[:3], parts, strict=True))


def _empty_heads(like: Tensor) -> Tensor:
    """R H T K where the heads of a row are adjacent, as the output projection reads them."""
    rows, heads, steps, width = like.shape
    return torch.empty(rows, steps, heads, width, dtype=like.dtype).transpose(1, 2)


def _call(
    function: ctypes._NamedFuncPointer, given: dict[str, Tensor], mask: Tensor | None, scale: float, causal: bool
) -> None:
    task = _Arguments(scale=scale, causal=causal, threads=torch.get_num_threads())
    for number, name in enumerate(TENSORS):
        if name in given:
            setattr(task, name, given[name].data_ptr())
            task.strides[number][:] = given[name].stride()[:3]
    query = given["query"]
    task.rows, task.heads, task.queries, task.width = query.shape
    task.length, task.bf16 = given["keys"].size(2), query.dtype == torch.bfloat16
    if mask is not None:
        task.mask, task.mask_stride = mask.data_ptr(), mask.stride(0) if mask.size(0) > 1 else 0
    if function(ctypes.byref(task)):
        raise MemoryError("not enough memory for attention")
