"""Rows in, their parts out, side by side as they lay; and in the backward pass the parts' gradients become one again.

Torch copies the gradients of parts into a new tensor. Where whoever made them let them lie side by side already, there
is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transduce.kernels.dispatch import own_kernels


def part(rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """... D -> parts of these sizes, which add up to D"""
    if own_kernels(rows):
        made: tuple[Tensor, ...] = _Part.apply(rows, tuple(sizes))
        return made
    return rows.split(list(sizes), -1)


def adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether these are parts of the same rows, one right after the other."""
    first = parts[0]
    # One row of a part is all its dimensions but those over which rows are counted: sources and steps, or all but one.
    wide = first.size(-1) * (first.size(1) if first.dim() == 4 else 1)
    alike = all(
        one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and one.stride() == first.stride()
        and one.shape == first.shape
        and one.dtype == first.dtype
        for one in parts
    )
    return alike and all(b.storage_offset() - a.storage_offset() == wide for a, b in pairwise(parts))


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.shape = sizes, rows.shape
        return tuple(one.view_as(one) for one in rows.split(list(sizes), -1))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if adjacent(grads) and grads[0].stride(-2) == ctx.shape[-1]:
            return grads[0].as_strided(ctx.shape, grads[0].stride()), None
        return torch.cat(grads, -1), None
