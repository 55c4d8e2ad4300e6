"""Vectors and a wide matrix in, scores for every id out, in rows that begin where a GPU reads and writes fastest.

The matrix unit moves 16 bytes at a time. The rows of a vocabulary of 50,257 in bf16 do not begin at multiples of that,
so the three products of the output layer fall back to kernels that are several times slower. A few more columns, whose
scores nobody reads, mend it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.kernels.dispatch import attached, compiles, narrow_kind
from transduce.kernels.linear import column_sums, summed_product

ALIGNED = 64  # numbers: 128 bytes in 16 bits
OURS = "room_at_the_end"  # marks where rows end with room that nobody else reads


def suits(layer: nn.Linear, values: Tensor) -> bool:
    """Whether there is anything to mend: in training on a GPU, where no compiler does the same."""
    ready = values.is_cuda and torch.is_grad_enabled() and not torch.compiler.is_compiling() and compiles()
    return ready and layer.out_features % 8 > 0 and type(layer) is nn.Linear and not attached(layer)


def scores(layer: nn.Linear, values: Tensor) -> Tensor:
    """W x + b: ... D -> ... V, V contiguous, the rows further apart."""
    flat = values.to(narrow_kind(values)).flatten(0, -2)
    with torch.autocast(values.device.type, enabled=False):
        made: Tensor = _Scores.apply(flat, layer.weight, layer.bias)
    return made.unflatten(0, values.shape[:-1])


def spaced(rows: int, size: int, like: Tensor) -> Tensor:
    """Room for so many rows of this size, which begin at round addresses."""
    made = like.new_empty(rows, _round(size))
    setattr(made.untyped_storage(), OURS, True)  # it stays with what lies there, whoever hands it on
    return made[:, :size]


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        size = len(weight)
        longer = values.new_zeros(_round(size), weight.size(1))
        longer[:size] = weight
        if bias is None:
            result = values @ longer.t()
        else:
            beside = values.new_zeros(_round(size))
            beside[:size] = bias
            result = torch.addmm(beside, values, longer.t())
        ctx.save_for_backward(values, longer)
        ctx.size, ctx.kind, ctx.biased = size, weight.dtype, bias is not None
        return result[:, :size]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        values, weight = ctx.saved_tensors
        slopes = _whole(grads[0], len(weight))
        to_weight = summed_product(slopes, values, ctx.kind)[: ctx.size]
        to_bias = column_sums(slopes)[1][: ctx.size].to(ctx.kind) if ctx.biased else None
        return slopes @ weight, to_weight, to_bias


def _round(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _whole(slopes: Tensor, size: int) -> Tensor:
    """The same with zeros in the room at the end of each row: in place, where it is ours.

    Parts of a gradient lie in such rows too, where scores were joined with others: that room is theirs.
    """
    rows, before = slopes.shape
    room, last = slopes.untyped_storage(), slopes.storage_offset() + rows * size
    inside = slopes.stride() == (size, 1) and last * slopes.element_size() <= room.nbytes()
    if not inside or not getattr(room, OURS, False):
        return nn.functional.pad(slopes, (0, size - before))
    whole = slopes.as_strided((rows, size), (size, 1))
    whole[:, before:].zero_()
    return whole
