"""Rows and a matrix in, their product out, through an activation where asked: a linear layer in recorded training.

The same three products as torch's own layer. What differs is around them: a rectifier is part of the first, the
gradient of an activation and that of the bias are one pass over the rows, and the gradient of the weights is fp32.
The gradient of a bias is the sum of the rows of another gradient. Whoever makes that one, and has its numbers at hand,
leaves the sums with it; then they need no pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn import functional as F

from transduce.kernels.dispatch import attached, narrow_kind, own_kernels
from transduce.kernels.weight_cast import narrow

WIDE, TALL = 64, 64  # a tile of the sums
PROGRAMS = 1024
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "_PartBackward")
LEFT = "sums_of_columns"
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


def product(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "") -> Tensor:
    """f(W x + b), f an activation or nothing, W and b of several layers one below the other: ... I -> ... O"""
    kind = narrow_kind(rows)
    flat, matrix = rows.to(kind).flatten(0, -2), narrow(weights, kind)
    bias = narrow(biases, kind) if biases else None
    with torch.autocast(rows.device.type, enabled=False):
        made: Tensor = _Product.apply(flat, matrix, bias, activation, *weights, *biases)
    return made.unflatten(0, rows.shape[:-1])


class _Product(torch.autograd.Function):
    """Of a matrix and a bias that stand for `learned`, which get the gradients: first what is in the matrix."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str, *learned: Tensor
    ) -> Tensor:
        rectified = activation == "relu"  # whose slope is known from what leaves it
        if bias is None:
            made = rows @ matrix.t()
            made = made.relu_() if rectified else made
        else:
            multiply = torch._addmm_activation if rectified else torch.addmm
            made = multiply(bias, rows, matrix.t())
        ctx.save_for_backward(rows, matrix, made if activation else None)
        ctx.kind, ctx.biased, ctx.activation = learned[0].dtype, bias is not None, activation
        ctx.sizes = [len(one) for one in learned if one.dim() == 2]
        ctx.asks = ctx.biased and not activation
        return made if rectified or not activation else ACTIVATIONS[activation](made)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix, gates = ctx.saved_tensors
        slopes = grads[0].contiguous()
        sums = left_sums(slopes) if ctx.asks else None
        if sums is None and (ctx.biased or ctx.activation):
            slopes, sums = column_sums(slopes, gates, ctx.activation)
        to_rows = slopes @ matrix if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = [None] * len(ctx.sizes)
        if any(ctx.needs_input_grad[4 : 4 + len(found)]):
            found = list(summed_product(slopes, rows, ctx.kind).split(ctx.sizes))
        if ctx.biased and sums is not None:
            found += sums.to(ctx.kind).split(ctx.sizes)
        return to_rows, None, None, None, *found


def summed_product(slopes: Tensor, rows: Tensor, kind: torch.dtype) -> Tensor:
    """slopes^T rows, N O and N I -> O I: the gradient of a matrix, in the precision it is kept in."""
    if slopes.is_cuda and kind == torch.float32:
        return torch.mm(slopes.t(), rows, out_dtype=kind)
    return (slopes.t() @ rows).to(kind)


def asks_for_sums(made: Tensor) -> bool:
    """Whether a product with a bias made these: it will want the sums of the columns of their gradient."""
    return bool(getattr(maker(made), "asks", False))


def maker(made: Tensor) -> Node | None:
    """What will be given the gradient of these, as it is."""
    node = made.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node


def leave_sums(slopes: Tensor, sums: Tensor) -> None:
    """For whoever reads this gradient (... O, alone in its memory): the sums of its columns (O, fp32)."""
    setattr(slopes.untyped_storage(), LEFT, (slopes._version, sums))  # there they outlive its views


def left_sums(slopes: Tensor) -> Tensor | None:
    """What was left with these rows (N O); None: nothing, or other gradients were added to them since."""
    memory = slopes.untyped_storage()
    version, sums = getattr(memory, LEFT, (0, None))
    whole = memory.nbytes() == slopes.nbytes and slopes.is_contiguous()
    return sums if sums is not None and whole and (slopes._version, slopes.size(-1)) == (version, len(sums)) else None


def column_sums(values: Tensor, gates: Tensor | None = None, activation: str = "") -> tuple[Tensor, Tensor]:
    """values (N O) and the sums of their columns (O, fp32); with gates, both times the activation's slope there."""
    from transduce.kernels.triton.add_norm import sum_columns

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
