"""Scores of tokens and the right ones enter; their label-smoothed cross-entropy leaves, and one gradient of V.

    loss = (1 - eps) (lse - x_gold) + eps (lse - mean x),   d loss / d x_j = p_j - (1 - eps) [j = gold] - eps / V

A plain computation keeps three copies of the scores in fp32, for a vocabulary the largest tensors of a training step.
Here they are read in the precision they have, a few rows at a time (on a GPU by one kernel), and only lse is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transduce.kernels.dispatch import compiles
from transduce.kernels.linear import asks_for_sums, column_sums, leave_sums, maker
from transduce.kernels.native import training as native_training
from transduce.kernels.output_projection import spaced

IGNORED = -100  # where the target is padding
PRODUCTS = ("AddmmBackward0", "MmBackward0")
# A tile of what is written with its sums. 16,384 rows of 32,000 scores took 0.53 ms so, as long as row by row without
# sums; in tiles of 64 rows and 64 columns 0.99.
TALL, WIDE, PROGRAMS = 2, 2048, 2048
CHUNK = 2**18  # scores that are worked on at a time: what a processor keeps near


class Smoothed(torch.autograd.Function):
    """apply(scores (M V), gold (M), label smoothing) -> the smoothed loss and the plain one, sums over the gold.

    `spare`: the caller needs the scores no more, so on a CPU their gradient may be written over them.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, gold: Tensor, smoothing: float, spare: bool = False) -> tuple[Tensor, Tensor]:
        sums, plain, smooth = (_wide(scores.new_empty(len(gold))) for _ in range(3))
        if scores.is_cuda and compiles():
            from transduce.kernels.triton.cross_entropy import read_rows

            given = (scores, gold, sums, plain, smooth, scores.stride(0), scores.size(1))
            read_rows[(len(gold),)](*given, tall=4, wide=512, num_warps=2)
        elif (kernels := native_training.kernels_for(scores)) is not None and scores.stride(1) == 1:
            native_training.read_rows(kernels, scores, gold, sums, plain, smooth)
        else:
            for rows in _chunks(scores):
                part, right = _wide(scores[rows]), gold[rows].clamp(min=0)
                sums[rows] = part.logsumexp(1)
                plain[rows] = sums[rows] - part.gather(1, right[:, None]).squeeze(1)
                if smoothing:
                    smooth[rows] = sums[rows] - part.mean(1)
        real = gold != IGNORED
        nll = plain.where(real, 0.0).sum()
        ctx.save_for_backward(scores, gold, sums)
        ctx.smoothing, ctx.spare = smoothing, spare and scores.is_contiguous() and _made_by_product(scores)
        ctx.asked = scores.is_cuda and asks_for_sums(scores)
        total = torch.lerp(nll, smooth.where(real, 0.0).sum(), smoothing) if smoothing else nll.clone()
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        scores, gold, sums = ctx.saved_tensors
        size, eps = scores.size(1), ctx.smoothing
        if scores.is_cuda and compiles():
            return _write(scores, gold, sums, grads[0], eps, ctx.asked), None, None, None
        if (kernels := native_training.kernels_for(scores)) is not None and scores.stride(1) == 1:
            result = scores.detach() if ctx.spare else torch.empty(scores.shape, dtype=scores.dtype)
            native_training.write_rows(kernels, scores, gold, sums, grads[0].float(), eps, result)
            if ctx.spare:
                torch.autograd.graph.increment_version(scores)  # whoever asks again is told
            return result, None, None, None
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        padded, right = gold == IGNORED, torch.full_like(sums[:, None], eps - 1)
        for rows in _chunks(scores):
            # In place: where scores are wide already, in what leaves.
            part = result[rows] if result.dtype == sums.dtype else torch.empty_like(scores[rows], dtype=sums.dtype)
            torch.sub(scores[rows], sums[rows, None], out=part).exp_()
            if eps:
                part.sub_(eps / size)
            part.scatter_add_(1, gold[rows].clamp(min=0)[:, None], right[rows]).mul_(grads[0])
            part.masked_fill_(padded[rows, None], 0.0)
            if part.dtype != result.dtype:
                result[rows] = part
        return result, None, None, None


def _made_by_product(scores: Tensor) -> bool:
    """Whether they are as a matrix product gave them, whose own gradient does not need them."""
    node = maker(scores)
    return node is not None and node.name() in PRODUCTS


def _write(scores: Tensor, gold: Tensor, sums: Tensor, factor: Tensor, smoothing: float, asked: bool) -> Tensor:
    """The gradient, by a kernel; `asked`: with the sums of its columns, which the bias of the output layer needs."""
    from transduce.kernels.triton.cross_entropy import write_rows, write_tiles

    count, size = scores.shape
    if asked and scores.is_contiguous() and size % 16 == 0:  # else tiles are not read 16 bytes at a time
        across = -(-size // WIDE)
        parts = min(-(-count // TALL), max(1, PROGRAMS // across))
        result, totals = torch.empty_like(scores), sums.new_empty(parts, size)
        write_tiles[(across, parts)](
            scores, gold, sums, factor, result, totals, count, size, smoothing, tall=TALL, wide=WIDE, num_warps=8
        )
        leave_sums(result, column_sums(totals)[1])
        return result
    result = spaced(count, size, scores) if scores.stride(0) > size else torch.empty_like(scores)
    strides = scores.stride(0), result.stride(0)
    write_rows[(count,)](scores, gold, sums, factor, result, *strides, size, smoothing, block=4096)
    return result


def _wide(values: Tensor) -> Tensor:
    """Sums over a vocabulary lose digits in bf16."""
    return values if values.dtype == torch.double else values.float()


def _chunks(scores: Tensor) -> list[slice]:
    step = max(1, CHUNK // scores.size(1))
    return [slice(begin, begin + step) for begin in range(0, len(scores), step)]
