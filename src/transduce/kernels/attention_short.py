"""Short rows of queries, keys and values in, contexts out: attention in training on a CPU, by one kernel each way.

Torch's kernels are made for long rows: with 32 rows of 32 tokens and four heads they took 8.8 ms in bf16, forward and
backward, and this one 2.6. Here a row and a head is one piece of work that stays in the cache, in fp32 within.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transduce.kernels.attention_tiles import MOST, keys_alone
from transduce.kernels.native.attention import look, look_slopes
from transduce.kernels.native.training import kernels_for


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        kernels = kernels_for(query)
        assert kernels is not None
        ctx.save_for_backward(query, keys, values, mask)
        ctx.scale, ctx.causal = scale, causal
        return look(kernels, (query, keys, values), mask, scale, causal)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mask = ctx.saved_tensors
        kernels = kernels_for(query)
        assert kernels is not None
        slopes = grads[0].to(query.dtype)
        slopes = slopes if slopes.stride(3) == 1 else slopes.contiguous()
        return *look_slopes(kernels, (query, keys, values), mask, ctx.scale, ctx.causal, slopes), None, None, None


def suits(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel takes them: in training on a CPU, short rows, one mask for all steps and heads of a row."""
    if query.dim() != 4 or not query.is_cpu or not torch.is_grad_enabled() or max(query.size(2), keys.size(2)) > MOST:
        return False
    alike = query.shape[:2] == keys.shape[:2] and query.dtype == keys.dtype == values.dtype
    whole = all(part.stride(3) == 1 and part.numel() for part in (query, keys, values))
    same = query.size(3) == keys.size(3) == values.size(3)
    return keys_alone(mask) and alike and whole and same and kernels_for(query, keys, values) is not None


def attend_short(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """query R H T K, keys and values R H S K, mask . 1 1 S -> R H T K"""
    result: Tensor = _Look.apply(query, keys, values, mask, scale, causal)
    return result
