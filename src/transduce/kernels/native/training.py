"""Scores and gold tokens in, losses and gradients out; numbers in, some left out; queries and keys in, scores out."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from transduce.kernels.native.library import loaded

KINDS = (torch.float32, torch.bfloat16)
MOST = 2**32  # numbers that a dropout tells apart


def kernels_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, where they are there and can read these; None: ask torch."""
    suits = all(one.is_cpu and one.dtype in KINDS and type(one) in (Tensor, torch.nn.Parameter) for one in tensors)
    return loaded() if suits and not torch.compiler.is_compiling() else None


def _narrow(values: Tensor) -> bool:
    return values.dtype == torch.bfloat16


def read_rows(kernels: ctypes.CDLL, scores: Tensor, gold: Tensor, sums: Tensor, plain: Tensor, smooth: Tensor) -> None:
    """Writes log sum exp of rows of scores (M V), the loss of the gold (M), and that of all alike; 0 for padding."""
    found = (one.data_ptr() for one in (gold, sums, plain, smooth))
    shape = (*scores.shape, scores.stride(0))
    kernels.transduce_read_rows(scores.data_ptr(), _narrow(scores), *shape, *found, torch.get_num_threads())


def write_rows(
    kernels: ctypes.CDLL, scores: Tensor, gold: Tensor, sums: Tensor, slope: Tensor, smoothing: float, result: Tensor
) -> None:
    """Writes the gradient of the smoothed loss into `result` (M V), times a slope (1)."""
    found = (one.data_ptr() for one in (gold, sums, slope))
    shape = (*scores.shape, scores.stride(0))
    kernels.transduce_write_rows(
        scores.data_ptr(), _narrow(scores), *shape, *found, smoothing, result.data_ptr(), torch.get_num_threads()
    )


def drop(
    kernels: ctypes.CDLL, values: Tensor | None, changes: Tensor, seed: Tensor, rate: float, result: Tensor
) -> None:
    """Writes values + dropout(changes); all lie in one piece, `values` and a sum with them in fp32."""
    added = None if values is None else values.data_ptr()
    kinds = (_narrow(changes), changes.numel(), seed.data_ptr(), rate)
    kernels.transduce_drop(
        added, changes.data_ptr(), *kinds, result.data_ptr(), _narrow(result), torch.get_num_threads()
    )


def meet(kernels: ctypes.CDLL, query: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
    """v . tanh(q + k) of queries (B N Q), keys (B S Q) and a vector (Q, in fp32): B N S, in fp32."""
    scores = torch.empty(*query.shape[:2], keys.size(1))
    given = (query.data_ptr(), keys.data_ptr(), vector.data_ptr(), _narrow(query), *scores.shape, keys.size(2))
    kernels.transduce_meet(*given, scores.data_ptr(), torch.get_num_threads())
    return scores


def part(
    kernels: ctypes.CDLL, query: Tensor, keys: Tensor, vector: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and vector, in fp32, for those of the scores (B N S, in fp32)."""
    found = tuple(torch.zeros(shape) for shape in (query.shape, keys.shape, keys.shape[::2]))
    given = (query.data_ptr(), keys.data_ptr(), vector.data_ptr(), _narrow(query), *slopes.shape, keys.size(2))
    places = (one.data_ptr() for one in found)
    kernels.transduce_part(*given, slopes.data_ptr(), *places, torch.get_num_threads())
    return found[0], found[1], found[2].sum(0)
