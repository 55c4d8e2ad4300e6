"""Values and what a layer made of them in, their sum with dropout, its norm, or both out: one GPU kernel each way.

By torch's own kernels such a sum in training is four passes over fp32 numbers, and its gradient six. Here what is read
is read once, sums are made in fp32, and what a matrix will read leaves in its precision. What dropout left out follows
from a seed, and is found again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.kernels.dispatch import attached, narrow_kind, own_kernels
from transduce.kernels.linear import asks_for_sums, column_sums, leave_sums

MOST = 2**31  # numbers in a tensor: their places have 32 bits
WIDEST = 8192  # a row is one tile
TILE = 1024  # numbers that a program adds, where rows do not matter


def suits(values: Tensor, changes: Tensor | None = None) -> bool:
    """Whether the kernels are to be used."""
    alike = changes is None or (changes.shape == values.shape and changes.is_contiguous())
    fits = values.is_contiguous() and 0 < values.numel() < MOST and values.size(-1) <= WIDEST
    return own_kernels(values) and alike and fits


def levels(norm: nn.Module) -> bool:
    """Whether it is a norm of rows by their own numbers, with weights, and nothing hangs on it."""
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.elementwise_affine and not attached(norm)


def level(norm: nn.Module, values: Tensor, changes: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """norm(values + dropout(changes)): ... D -> ... D"""
    return _level(norm, values, changes, rate, False)[1]


def level_sum(norm: nn.Module, values: Tensor, changes: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """values + dropout(changes), and the norm of it"""
    return _level(norm, values, changes, rate, True)


def level_twice(norm: nn.Module, values: Tensor, changes: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The same norm for two readers: their gradients are added up where they are used."""
    return _level(norm, values, changes, rate, False)


def _level(
    norm: nn.Module, values: Tensor, changes: Tensor | None, rate: float, sums_up: bool
) -> tuple[Tensor, Tensor]:
    given: Any = norm
    centred, bias = isinstance(norm, nn.LayerNorm), getattr(given, "bias", None)
    beside, result = _Level.apply(values, changes, given.weight, bias, rate, given.eps, centred, sums_up)
    return beside, result


def add(values: Tensor, changes: Tensor, rate: float) -> Tensor:
    """values + dropout(changes)"""
    result: Tensor = _Add.apply(values, changes, rate)
    return result


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, changes: Tensor, rate: float) -> Tensor:
        from transduce.kernels.triton.add_norm import add_rows

        seed, limit, factor = _draw(values, rate)
        result = torch.empty_like(values)
        add_rows[(_tiles(values),)](values, changes, seed, result, values.numel(), limit, factor, rate > 0, block=TILE)
        ctx.save_for_backward(seed)
        ctx.rate, ctx.kind = rate, changes.dtype
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from transduce.kernels.triton.add_norm import drop_rows

        slopes = grads[0].contiguous()
        if not ctx.rate:
            return slopes, slopes.to(ctx.kind), None
        limit, factor = _scale(ctx.rate)
        result = torch.empty_like(slopes, dtype=ctx.kind)
        seed = ctx.saved_tensors[0]
        drop_rows[(_tiles(slopes),)](slopes, seed, result, slopes.numel(), limit, factor, block=TILE)
        return slopes, result, None


class _Level(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        changes: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        rate: float,
        epsilon: float | None,
        centred: bool,
        sums_up: bool,
    ) -> tuple[Tensor, Tensor]:
        from transduce.kernels.triton.add_norm import level_rows

        width = values.size(-1)
        count = values.numel() // width
        seed, limit, factor = _draw(values, rate if changes is not None else 0.0)
        drops = changes is not None and rate > 0
        means, scales = values.new_empty(2, count, dtype=torch.float32)
        result = torch.empty_like(values, dtype=narrow_kind(values))
        total = torch.empty_like(values) if sums_up else None
        block, rows, warps = _shape(width)
        small = torch.finfo(values.dtype).eps if epsilon is None else epsilon
        level_rows[(-(-count // rows),)](
            values, changes, seed, weight, bias, total, result, means, scales, count, limit, factor, small,
            width=width, drops=drops, centred=centred, block=block, rows=rows, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(values, changes, weight, seed, means, scales)
        ctx.rate, ctx.drops, ctx.centred, ctx.bias = rate, drops, centred, None if bias is None else bias.dtype
        ctx.sums_up, ctx.asked = sums_up, changes is not None and asks_for_sums(changes)
        ctx.set_materialize_grads(False)
        return result.view_as(result) if total is None else total, result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, beside: Tensor | None, slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        from transduce.kernels.triton.add_norm import level_slopes

        values, changes, weight, seed, means, scales = ctx.saved_tensors
        width = values.size(-1)
        if slopes is None and not ctx.sums_up:
            slopes, beside = beside, None
        slopes = torch.zeros_like(values) if slopes is None else slopes.contiguous()
        beside = None if beside is None else beside.contiguous()
        count = values.numel() // width
        limit, factor = _scale(ctx.rate)
        block, rows, warps = _shape(width)
        programs = min(-(-count // rows), 8 * _units(values.device))
        to_values, to_changes = torch.empty_like(values), None if changes is None else torch.empty_like(changes)
        # For the weight, for the bias, and for the bias of the product that made the changes.
        sums = values.new_empty(programs, (3 if ctx.asked else 2) * width, dtype=torch.float32)
        level_slopes[(programs,)](
            slopes, beside, values, changes, seed, weight, means, scales, to_values, to_changes, sums,
            count, limit, factor,
            width=width, drops=ctx.drops, centred=ctx.centred, sums_up=ctx.sums_up, asked=ctx.asked,
            block=block, rows=rows, num_warps=warps,
        )  # fmt: skip
        to_weight, to_bias, *to_product = column_sums(sums)[1].split(width)
        if to_changes is not None and to_product:
            leave_sums(to_changes, to_product[0])
        for_bias = None if ctx.bias is None else to_bias.to(ctx.bias)
        return to_values, to_changes, to_weight.to(weight.dtype), for_bias, None, None, None, None


def _tiles(values: Tensor) -> int:
    return -(-values.numel() // TILE)


def _shape(width: int) -> tuple[int, int, int]:
    """Numbers of a tile's row, its rows, and the warps that work on it."""
    block = max(16, 1 << (width - 1).bit_length())
    if block <= 512:
        return block, 1024 // block, 2
    return block, 2 if block == 1024 else 1, 4 if block <= 2048 else 8


def _scale(rate: float) -> tuple[int, float]:
    """Below which of 2 ** 32 draws a number is left out, and by what the others grow."""
    return min(int(rate * 2**32), 2**32 - 1), 1 / (1 - rate) if rate < 1 else 0.0


def _draw(values: Tensor, rate: float) -> tuple[Tensor, int, float]:
    seed = torch.empty(1, dtype=torch.long, device=values.device)
    return (seed.random_() if rate else seed), *_scale(rate)


def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
