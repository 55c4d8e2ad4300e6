"""Numbers in, the same with some left out and the others scaled up out, alone or added to other numbers.

On a CPU torch draws each number from its own generator, which took 4 to 6 % of a training step of a Transformer. Our
kernel makes the draws of a tensor from one seed, which torch's generator gives: they follow from its state like any
others, and the backward pass makes them again instead of keeping them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.kernels import add_norm as levelling
from transduce.kernels.native.training import MOST, drop, kernels_for


class _Drop(torch.autograd.Function):
    """values + dropout(changes), or dropout(changes) alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor | None, changes: Tensor, rate: float) -> Tensor:
        kernels = kernels_for(changes)
        assert kernels is not None
        seed = torch.empty(1, dtype=torch.long).random_()  # never read here: where it lies is enough
        result = torch.empty_like(changes, dtype=changes.dtype if values is None else values.dtype)
        drop(kernels, values, changes, seed, rate, result)
        ctx.save_for_backward(seed)
        ctx.rate, ctx.kind, ctx.alone = rate, changes.dtype, values is None
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        slope = grads[0].contiguous()
        kernels = kernels_for(slope)
        assert kernels is not None
        result = torch.empty_like(slope, dtype=ctx.kind)
        drop(kernels, None, slope, ctx.saved_tensors[0], ctx.rate, result)
        return None if ctx.alone else slope, result, None


class Dropout(nn.Dropout):
    """each number is 0 with probability p, else divided by 1 - p (Srivastava 2014)"""

    def forward(self, values: Tensor) -> Tensor:
        if not _suits(self, values):
            return super().forward(values)
        result: Tensor = _Drop.apply(None, values, self.p)
        return result


def add_dropped(values: Tensor, changes: Tensor, dropout: nn.Module) -> Tensor:
    """values + dropout(changes), in one pass over them where that can be."""
    alike = values.shape == changes.shape and values.dtype == torch.float32 and values.is_contiguous()
    if alike and isinstance(dropout, Dropout) and _suits(dropout, changes):
        result: Tensor = _Drop.apply(values, changes, dropout.p)
        return result
    if isinstance(dropout, nn.Dropout) and levelling.suits(values, changes):
        return levelling.add(values, changes, dropout.p if dropout.training else 0.0)
    total: Tensor = values + dropout(changes)
    return total


def _suits(dropout: nn.Dropout, values: Tensor) -> bool:
    works = dropout.training and 0 < dropout.p < 1 and values.is_contiguous() and 0 < values.numel() < MOST
    return works and kernels_for(values) is not None
