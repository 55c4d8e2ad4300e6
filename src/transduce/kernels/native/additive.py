"""Queries, keys and values of additive attention in, contexts out; with the gradient of those, the gradients of all."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

POINTERS = ("query", "keys", "values", "slopes", "vector", "seen", "weights")
RESULTS = ("contexts", "for_query", "for_keys", "for_values", "for_vector")
NUMBERS = ("sources", "steps", "slots", "width", "value_width", "seen_row", "narrow", "narrow_values", "threads")


class _Reading(ctypes.Structure):
    """As in readings.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*POINTERS, *RESULTS)),
        *((name, ctypes.c_int64) for name in NUMBERS),
    ]


@dataclass(frozen=True)
class Reading:
    """Additive attention: all in one piece; keys in the precision of the queries, the vector in fp32."""

    query: Tensor  # B N Q
    keys: Tensor  # B S Q
    values: Tensor  # B S D
    vector: Tensor  # Q
    mask: Tensor | None  # B 1 S or 1 1 S
    weights: Tensor  # B N S, fp32: written by `read_memory`


def read_memory(kernels: ctypes.CDLL, given: Reading) -> Tensor:
    """The contexts: B N D, in the precision of the queries."""
    contexts = given.query.new_empty(*given.query.shape[:2], given.values.size(2))
    _call(kernels.transduce_read_memory, given, {"contexts": contexts})
    return contexts


def read_memory_slopes(kernels: ctypes.CDLL, given: Reading, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values and vector for that of the contexts."""
    query, keys, values = (torch.empty_like(one) for one in (given.query, given.keys, given.values))
    vectors = torch.empty(len(query), given.vector.numel())
    found = {"for_query": query, "for_keys": keys, "for_values": values, "for_vector": vectors}
    _call(kernels.transduce_read_memory_slopes, given, {"slopes": slopes, **found})
    return query, keys, values, vectors.sum(0)


def _call(function: ctypes._NamedFuncPointer, given: Reading, more: dict[str, Tensor]) -> None:
    tensors = {name: getattr(given, name) for name in ("query", "keys", "values", "vector", "weights")} | more
    task = _Reading(**{name: one.data_ptr() for name, one in tensors.items()})
    task.sources, task.steps, task.slots = given.weights.shape
    task.width, task.value_width = given.keys.size(2), given.values.size(2)
    task.narrow, task.narrow_values = (one.dtype == torch.bfloat16 for one in (given.query, given.values))
    task.threads = torch.get_num_threads()
    if given.mask is not None:
        task.seen, task.seen_row = given.mask.data_ptr(), given.mask.stride(0) if len(given.mask) > 1 else 0
    if function(ctypes.byref(task)):
        raise MemoryError("not enough memory for attention")
