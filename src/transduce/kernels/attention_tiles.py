"""Short rows of queries, keys and values in, their contexts out: attention in training, one tile a row and head.

General kernels go through a row in pieces of 64 to 128: a sentence of 30 tokens fills a quarter of one and takes as
long as a whole. Here every row and head is one program, in a tile as large as it needs. It holds all weights at once,
so the backward pass is one program as well, and nothing is kept between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transduce.kernels.dispatch import own_kernels
from transduce.kernels.linear import asks_for_sums, column_sums, leave_sums
from transduce.kernels.split import adjacent

MOST = 128  # queries or keys


def suits(query: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels are to be used: for short rows and a mask that all heads share."""
    if not own_kernels(query) or query.dim() != 4 or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    short = max(query.size(2), keys.size(2)) <= MOST and query.size(3) in (16, 32, 64, 128)
    return short and all_heads(mask) and query.shape[:2] == keys.shape[:2]


def all_heads(mask: Tensor | None) -> bool:
    """Whether a mask (R H T S) says the same to all heads of a row."""
    return mask is None or (mask.dtype == torch.bool and mask.size(1) == 1 and mask.stride(3) == 1)


def keys_alone(mask: Tensor | None) -> bool:
    """Whether a mask (R H T S) says which keys are real, and the same to all heads and steps of a row."""
    return all_heads(mask) and (mask is None or mask.size(2) == 1)


def attend_tiles(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """query B H T K, keys and values B H S K (any strides), mask . 1 . S -> B H T K"""
    result: Tensor = _Tiles.apply(query, keys, values, mask, scale, causal)
    return result


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        from transduce.kernels.triton.attention_tiles import tile_contexts

        query, keys, values = (_packed(part) for part in (query, keys, values))
        result = _rooms(query)[0]
        sources, heads, steps, width = query.shape
        tile_contexts[(sources * heads,)](
            query, keys, values, mask, result, scale, heads, steps, keys.size(2), *_jumps(mask),
            *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *result.stride()[:3],
            causal=causal, by_step=_by_step(mask), **_shape(steps, keys.size(2), width),
        )  # fmt: skip
        ctx.save_for_backward(query, keys, values, mask)
        ctx.scale, ctx.causal = scale, causal
        ctx.asked = any(asks_for_sums(part) for part in (query, keys, values))
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from transduce.kernels.triton.attention_tiles import tile_slopes

        query, keys, values, mask = ctx.saved_tensors
        slopes = _packed(grads[0])
        # Gradients lie as what they belong to does: side by side, where one product made all of it.
        if adjacent((query, keys, values)):
            rooms = [_rooms(query, keys, values)]
        else:
            both = [_rooms(keys, values)] if adjacent((keys, values)) else [_rooms(keys), _rooms(values)]
            rooms = [_rooms(query), *both]
        results = [part for room in rooms for part in room]
        sources, heads, steps, width = query.shape
        sums = query.new_empty(sources, 3 * heads * width, dtype=torch.float32) if ctx.asked else None
        parts = (query, keys, values, slopes, *results)
        tile_slopes[(sources * heads,)](
            query, keys, values, mask, slopes, *results, sums, ctx.scale, heads, steps, keys.size(2), *_jumps(mask),
            *(step for part in parts for step in part.stride()[:3]),
            causal=ctx.causal, by_step=_by_step(mask), **_shape(steps, keys.size(2), width),
        )  # fmt: skip
        if sums is not None:
            sizes = [len(room) * heads * width for room in rooms]
            for room, total in zip(rooms, column_sums(sums)[1].split(sizes), strict=True):
                leave_sums(room[0], total)
        return *results, None, None, None


def _packed(part: Tensor) -> Tensor:
    return part if part.stride(3) == 1 else part.contiguous()


def _rooms(*parts: Tensor) -> tuple[Tensor, ...]:
    """Like each of these, B H T K: the heads of a row lie side by side, and so do the parts."""
    sources, heads, steps, width = parts[0].shape
    made = parts[0].new_empty(sources, steps, len(parts), heads, width)
    return tuple(part.transpose(1, 2) for part in made.unbind(2))


def _jumps(mask: Tensor | None) -> tuple[int, int]:
    """From the mask of one source to that of the next, and from that of one step; 0: all have the same."""
    if mask is None:
        return 0, 0
    return mask.stride(0) if mask.size(0) > 1 else 0, mask.stride(2) if mask.size(2) > 1 else 0


def _by_step(mask: Tensor | None) -> bool:
    return mask is not None and mask.size(2) > 1


def _shape(steps: int, slots: int, width: int) -> dict[str, int]:
    tall, wide = (max(16, 1 << (size - 1).bit_length()) for size in (steps, slots))
    return {"width": width, "tall": tall, "wide": wide, "num_warps": 4}
