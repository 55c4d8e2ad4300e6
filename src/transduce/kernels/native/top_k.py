"""Scores of every token in, the best of them out."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.kernels.native.library import loaded

MOST = 32  # of the best, which are kept in order one by one


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """The `count` best of the last axis, and where, the earlier of two that are equal; None: ask torch."""
    kernels = loaded()
    if kernels is None or scores.dtype != torch.float32 or not scores.is_cpu or not scores.is_contiguous():
        return None
    size = scores.size(-1)
    if not 0 < count <= min(MOST, size):
        return None
    shape = (*scores.shape[:-1], count)
    best, places = torch.empty(shape), torch.empty(shape, dtype=torch.long)
    kernels.transduce_top(scores.data_ptr(), scores.numel() // size, size, count, best.data_ptr(), places.data_ptr())
    return best, places
