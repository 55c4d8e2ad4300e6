"""Native top-k: the best scores of each row, and the best outputs of a linear layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from transduce.flow import Shortlists
from transduce.kernels.native.library import loaded
from transduce.kernels.native.linear import NativeLinear

MAX_K = 32  # the best scores are held in a sorted list, which pays only while it is short


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Values and indices of the k best of the last axis, the earlier of two equal ones; None: use torch instead."""
    kernels = loaded()
    if kernels is None or scores.dtype != torch.float32 or not scores.is_cpu or not scores.is_contiguous():
        return None
    size = scores.size(-1)
    if not 0 < k <= min(MAX_K, size):
        return None
    shape = (*scores.shape[:-1], k)
    values, indices = torch.empty(shape), torch.empty(shape, dtype=torch.long)
    kernels.transduce_top_k(scores.data_ptr(), scores.numel() // size, size, k, values.data_ptr(), indices.data_ptr())
    return values, indices


class TopKStruct(ctypes.Structure):
    """`TopKRequest` of top_k.h"""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("num_suppressed", ctypes.c_int64),
        ("suppressed", ctypes.c_void_p),
        ("log_probs", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("shortlists", ctypes.c_void_p),
    )


class ShortlistsStruct(ctypes.Structure):
    """`Shortlists` of top_k.h"""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "tokens", "offsets", "list_ids"))
    tensors: tuple[Tensor, ...] = ()  # the tensors at these addresses, kept alive


class TopKBuffers:
    """Output buffers of a native top-k: log-probabilities and tokens, R M."""

    def __init__(
        self, rows: int, k: int, suppressed: Sequence[int], shortlists: ShortlistsStruct | None = None
    ) -> None:
        self.log_probs, self.tokens = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.long)
        self.suppressed = (ctypes.c_int64 * len(suppressed))(*suppressed)
        self.shortlists = shortlists  # kept alive: the struct below holds its address
        self.struct = TopKStruct(
            k,
            len(suppressed),
            ctypes.addressof(self.suppressed),
            self.log_probs.data_ptr(),
            self.tokens.data_ptr(),
            None if shortlists is None else ctypes.addressof(shortlists),
        )


def shortlists_struct(layer: NativeLinear, lists: Shortlists | None) -> ShortlistsStruct | None:
    """The shortlist of each source (see `contracts.Shortlists`) with the rows of the output layer that they select."""
    if lists is None:
        return None
    tensors = layer.output_major, lists.tokens, lists.begins, lists.which
    struct = ShortlistsStruct(*(one.data_ptr() for one in tensors))
    struct.tensors = tensors
    return struct


def linear_top_k(
    layer: NativeLinear, values: Tensor, k: int, suppressed: Sequence[int] = (), lists: Shortlists | None = None
) -> TopKBuffers:
    """The k best of log softmax(W x + b) of each row (R D), the earlier of two equal ones; with lists, one per row."""
    assert layer.kernels is not None
    values = values.float().contiguous()
    result = TopKBuffers(len(values), k, suppressed, shortlists_struct(layer, lists))
    request, address = ctypes.addressof(result.struct), ctypes.addressof(layer.struct)
    if layer.kernels.transduce_linear_top_k(address, values.data_ptr(), len(values), request, torch.get_num_threads()):
        raise MemoryError("out of memory in the output layer")
    return result
