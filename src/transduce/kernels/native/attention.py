"""Queries, keys and values of short rows in, contexts out; with the gradient of those, the gradients of all three."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

PARTS = ("query", "keys", "values", "slopes", "contexts", "for_query", "for_keys", "for_values")


class _Heads(ctypes.Structure):
    """As in heads.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in PARTS),
        ("seen", ctypes.c_void_p),
        ("places", (ctypes.c_int64 * 3) * len(PARTS)),
        *((name, ctypes.c_int64) for name in ("seen_row", "narrow", "rows", "heads", "steps", "slots", "width")),
        *((name, ctypes.c_int64) for name in ("causal", "threads")),
        ("scale", ctypes.c_double),
    ]


def look(kernels: ctypes.CDLL, parts: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Queries (R H T K), keys and values (R H S K), each K in one piece; mask R 1 1 S -> contexts, R H T K."""
    contexts = _room(parts[0])
    _call(kernels.transduce_look, {**_named(parts), "contexts": contexts}, mask, scale, causal)
    return contexts


def look_slopes(
    kernels: ctypes.CDLL, parts: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool, slopes: Tensor
) -> list[Tensor]:
    """The gradients of queries, keys and values for that of the contexts."""
    found = [_room(part) for part in parts]
    results = dict(zip(PARTS[5:], found, strict=True))
    _call(kernels.transduce_look_slopes, {**_named(parts), "slopes": slopes, **results}, mask, scale, causal)
    return found


def _named(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(PARTS[:3], parts, strict=True))


def _room(like: Tensor) -> Tensor:
    """R H T K where rows of all heads lie side by side, as what follows reads them."""
    rows, heads, steps, width = like.shape
    return torch.empty(rows, steps, heads, width, dtype=like.dtype).transpose(1, 2)


def _call(
    function: ctypes._NamedFuncPointer, given: dict[str, Tensor], mask: Tensor | None, scale: float, causal: bool
) -> None:
    task = _Heads(scale=scale, causal=causal, threads=torch.get_num_threads())
    for number, name in enumerate(PARTS):
        if name in given:
            setattr(task, name, given[name].data_ptr())
            task.places[number][:] = given[name].stride()[:3]
    query = given["query"]
    task.rows, task.heads, task.steps, task.width = query.shape
    task.slots, task.narrow = given["keys"].size(2), query.dtype == torch.bfloat16
    if mask is not None:
        task.seen, task.seen_row = mask.data_ptr(), mask.stride(0) if mask.size(0) > 1 else 0
    if function(ctypes.byref(task)):
        raise MemoryError("not enough memory for attention")
