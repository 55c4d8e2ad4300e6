"""Rows and a matrix in, their product out, through an activation where asked: a linear layer in recorded training.

The same three products as torch's own layer. What differs is around them: a rectifier is part of the first, the
gradient of an activation and that of the bias are one pass over the rows, and the gradient of the weights is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transduce.layers.traits import attached, narrow_kind, own_kernels

WIDE, TALL = 64, 64  # a tile of the sums
PROGRAMS = 1024
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def suits(layers: tuple[nn.Module, ...], rows: Tensor) -> bool:
    """Whether it is to be used: for plain layers, in a precision of the matrix unit."""
    plain = all(type(layer) is nn.Linear and not attached(layer) for layer in layers)
    return own_kernels(rows) and plain and rows.numel() > 0 and narrow_kind(rows) in (torch.bfloat16, torch.float16)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    """f(W x + b), f an activation or nothing: ... I -> ... O"""
    flat = rows.to(narrow_kind(rows)).flatten(0, -2)
    with torch.autocast(rows.device.type, enabled=False):
        made: Tensor = _Product.apply(flat, weight, bias, activation)
    return made.unflatten(0, rows.shape[:-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        narrow, rectified = weight.to(rows.dtype), activation == "relu"  # whose slope is known from what leaves it
        if bias is None:
            made = rows @ narrow.t()
            made = made.relu_() if rectified else made
        else:
            multiply = torch._addmm_activation if rectified else torch.addmm
            made = multiply(bias.to(rows.dtype), rows, narrow.t())
        ctx.save_for_backward(rows, narrow, made if activation else None)
        ctx.kind, ctx.biased, ctx.activation = weight.dtype, bias is not None, activation
        return made if rectified or not activation else ACTIVATIONS[activation](made)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, gates = ctx.saved_tensors
        slopes, sums = grads[0].contiguous(), None
        if ctx.biased or ctx.activation:
            slopes, sums = column_sums(slopes, gates, ctx.activation)
        to_rows = slopes @ weight if ctx.needs_input_grad[0] else None
        to_weight = summed_product(slopes, rows, ctx.kind) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, sums.to(ctx.kind) if ctx.biased else None, None  # type: ignore[union-attr]


def summed_product(slopes: Tensor, rows: Tensor, kind: torch.dtype) -> Tensor:
    """slopes^T rows, N O and N I -> O I: the gradient of a matrix, in the precision it is kept in."""
    if slopes.is_cuda and kind == torch.float32:
        return torch.mm(slopes.t(), rows, out_dtype=kind)
    return (slopes.t() @ rows).to(kind)


def column_sums(values: Tensor, gates: Tensor | None = None, activation: str = "") -> tuple[Tensor, Tensor]:
    """values (N O) and the sums of their columns (O, fp32); with gates, both times the activation's slope there."""
    from transduce.layers.kernels import sum_columns

    count, size = values.shape
    across = -(-size // WIDE)
    parts = max(1, min(-(-count // TALL), PROGRAMS // across))
    result = values if gates is None else torch.empty_like(values)
    sums = values.new_empty(parts, size, dtype=torch.float32)
    shape = {"tall": TALL, "wide": WIDE, "num_warps": 4}
    sum_columns[(across, parts)](
        values, gates, result, sums, count, size, values.stride(0), activation=activation, **shape
    )
    if parts == 1:
        return result, sums[0]
    whole = values.new_empty(size, dtype=torch.float32)
    sum_columns[(across, 1)](sums, None, sums, whole, parts, size, size, activation="", **shape)
    return result, whole
