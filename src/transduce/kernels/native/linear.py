"""A trained matrix in, the same in our kernels' own order out: W x + b in fp32 or 8-bit whole numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.kernels.native.library import library

LARGE = 1 << 21  # bytes from which large pages pay


class Matrix(ctypes.Structure):
    """`Matrix` of products.h"""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("whole", ctypes.c_int64),
    )


class Product:
    """x W^T + b; in whole numbers w = s round(w / s), x = s round(x / s), s = max|.| / 127 of an output and a row."""

    def __init__(self, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        """weight: O I, in fp32; or int8, with its scales."""
        self.kernels = kernels = library()
        assert kernels is not None, "ask library() first"
        self.outputs, self.inputs = weight.shape
        panel = kernels.transduce_panel()
        room = -(-self.outputs // panel) * panel
        weight = (weight.detach().float() if scales is None else weight).contiguous()
        # The tensors behind the addresses: they must live as long as this does.
        self.sums = torch.zeros(room, dtype=torch.int32)
        self.scales = None if scales is None else F.pad(scales.detach().float(), (0, room - self.outputs))
        self.bias = None if bias is None else F.pad(bias.detach().float(), (0, room - self.outputs))
        if self.scales is None:
            self.weights = _in_large_pages(kernels, room * self.inputs, torch.float32)
            kernels.transduce_pack_floats(weight.data_ptr(), *weight.shape, self.weights.data_ptr())
        else:
            self.weights = _in_large_pages(kernels, room * (-(-self.inputs // 4) * 4), torch.int8)
            kernels.transduce_pack_wholes(
                weight.data_ptr(), *weight.shape, self.weights.data_ptr(), self.sums.data_ptr()
            )
        addresses = [None if one is None else one.data_ptr() for one in (self.weights, self.scales, self.bias)]
        self.matrix = Matrix(*addresses, self.sums.data_ptr(), self.inputs, self.outputs, self.scales is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> Product:
        return self  # it is only ever read

    @cached_property
    def rows(self) -> Tensor:
        """The same weights output by output, filled up with 0: for a call that needs a few of them alone (lists.h)."""
        assert self.kernels is not None
        panel = self.kernels.transduce_panel()
        together = 1 if self.scales is None else 4  # inputs that lie side by side
        group = panel // 4 * together
        laid = self.weights.view(-1, len(self.weights) // len(self.sums) // together, panel, together)
        rows = laid.transpose(1, 2).reshape(len(self.sums), -1)[: self.outputs]
        made = _in_large_pages(self.kernels, self.outputs * (-(-rows.size(1) // group) * group), self.weights.dtype)
        made = made.zero_().view(self.outputs, -1)
        made[:, : rows.size(1)] = rows
        return made

    def reading(self, rectified: bool = False) -> Callable[[Tensor], Tensor]:
        """As a plain function; rectified: max(0, W x + b)."""
        assert self.kernels is not None
        read, threads = self.kernels.transduce_product, torch.get_num_threads
        here, outputs = ctypes.addressof(self.matrix), self.outputs

        def forward(values: Tensor, owner: Product = self) -> Tensor:  # the owner: what lies at the address lives on
            rows = values.to(torch.float32).contiguous()
            made = torch.empty((*values.shape[:-1], outputs), dtype=torch.float32)
            if read(here, rows.data_ptr(), made.numel() // outputs, made.data_ptr(), rectified, threads()):
                raise MemoryError("no memory for a product")
            return made.to(values.dtype)

        return forward


def _in_large_pages(kernels: ctypes.CDLL, size: int, kind: torch.dtype) -> Tensor:
    """Room that the system is asked to keep in large pages, before anything is written into it."""
    made = torch.empty(size, dtype=kind)
    if made.nbytes >= LARGE:
        kernels.transduce_advise(made.data_ptr(), made.nbytes)
    return made
