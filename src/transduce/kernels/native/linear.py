"""Native linear layers: W x + b in fp32 or int8, with weights in the order of linear.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.kernels.native.library import library

HUGE_PAGE_BYTES = 1 << 21  # size from which huge pages pay


class LinearStruct(ctypes.Structure):
    """`Linear` of linear.h"""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("int8", ctypes.c_int64),
    )


class NativeLinear:
    """x W^T + b; in int8 w = s round(w / s), x = s round(x / s), s = max|.| / 127 per output and per row."""

    def __init__(self, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        """weight: O I in fp32, or in int8 with its scales (O)."""
        self.kernels = kernels = library()
        assert kernels is not None, "check library() first"
        self.outputs, self.inputs = weight.shape
        panel = kernels.transduce_panel()
        padded = -(-self.outputs // panel) * panel
        weight = (weight.detach().float() if scales is None else weight).contiguous()
        # The C struct holds the addresses of these tensors, so they must live as long as this object.
        self.sums = torch.zeros(padded, dtype=torch.int32)
        self.scales = None if scales is None else F.pad(scales.detach().float(), (0, padded - self.outputs))
        self.bias = None if bias is None else F.pad(bias.detach().float(), (0, padded - self.outputs))
        if self.scales is None:
            self.weights = _empty_in_huge_pages(kernels, padded * self.inputs, torch.float32)
            kernels.transduce_pack_fp32(weight.data_ptr(), *weight.shape, self.weights.data_ptr())
        else:
            self.weights = _empty_in_huge_pages(kernels, padded * (-(-self.inputs // 4) * 4), torch.int8)
            kernels.transduce_pack_int8(weight.data_ptr(), *weight.shape, self.weights.data_ptr(), self.sums.data_ptr())
        addresses = [None if one is None else one.data_ptr() for one in (self.weights, self.scales, self.bias)]
        self.struct = LinearStruct(*addresses, self.sums.data_ptr(), self.inputs, self.outputs, self.scales is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeLinear:
        return self  # immutable

    @cached_property
    def output_major(self) -> Tensor:
        """The same weights row by row, padded with 0: for a call that reads a few outputs only (shortlists.h)."""
        assert self.kernels is not None
        panel = self.kernels.transduce_panel()
        interleaved = 1 if self.scales is None else 4  # consecutive inputs of one output
        group = panel // 4 * interleaved
        panels = self.weights.view(-1, len(self.weights) // len(self.sums) // interleaved, panel, interleaved)
        rows = panels.transpose(1, 2).reshape(len(self.sums), -1)[: self.outputs]
        size = self.outputs * (-(-rows.size(1) // group) * group)
        padded = _empty_in_huge_pages(self.kernels, size, self.weights.dtype).zero_().view(self.outputs, -1)
        padded[:, : rows.size(1)] = rows
        return padded

    def function(self, relu: bool = False) -> Callable[[Tensor], Tensor]:
        """The layer as a plain function; relu: max(0, W x + b)."""
        assert self.kernels is not None
        linear, threads = self.kernels.transduce_linear, torch.get_num_threads
        address, outputs = ctypes.addressof(self.struct), self.outputs

        def forward(values: Tensor, owner: NativeLinear = self) -> Tensor:  # the owner keeps the struct alive
            rows = values.to(torch.float32).contiguous()
            result = torch.empty((*values.shape[:-1], outputs), dtype=torch.float32)
            if linear(address, rows.data_ptr(), result.numel() // outputs, result.data_ptr(), relu, threads()):
                raise MemoryError("out of memory in a linear layer")
            return result.to(values.dtype)

        return forward


def _empty_in_huge_pages(kernels: ctypes.CDLL, size: int, dtype: torch.dtype) -> Tensor:
    """An empty tensor; a large one is advised to huge pages before its first write."""
    empty = torch.empty(size, dtype=dtype)
    if empty.nbytes >= HUGE_PAGE_BYTES:
        kernels.transduce_advise_huge_pages(empty.data_ptr(), empty.nbytes)
    return empty
