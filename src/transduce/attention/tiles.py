"""Short rows of queries, keys and values in, their contexts out: attention in training, one tile a row and head.

General kernels go through a row in pieces of 64 to 128: a sentence of 30 tokens fills a quarter of one and takes as
long as a whole. Here every row and head is one program, in a tile as large as it needs. It holds all weights at once, so
the backward pass is one program as well, and nothing is kept between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST = 128  # queries or keys


def suits(query: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels can be used: in training on a GPU, for short rows and a mask that all steps share."""
    ready = query.is_cuda and torch.is_grad_enabled() and query.dtype in (torch.bfloat16, torch.float16)
    short = query.dim() == 4 and max(query.size(2), keys.size(2)) <= MOST and query.size(3) in (16, 32, 64, 128)
    plain = mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1) and mask.stride(3) == 1)
    return ready and short and plain and query.shape[:2] == keys.shape[:2]


def attend_tiles(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """query B H T K, keys and values B H S K (any strides, K contiguous), mask . 1 1 S -> B H T K"""
    result: Tensor = contexts(query, keys, values, mask, scale, causal)
    return result


@torch.library.custom_op("transduce::tiles", mutates_args=())
def contexts(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    from transduce.attention.tilekernels import tile_contexts

    query, keys, values = (_packed(part) for part in (query, keys, values))
    result = _room(query)
    sources, heads, steps, width = query.shape
    tile_contexts[(sources * heads,)](
        query, keys, values, mask, result, scale, heads, steps, keys.size(2), _jump(mask),
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *result.stride()[:3],
        causal=causal, **_shape(steps, keys.size(2), width),
    )  # fmt: skip
    return result


@torch.library.custom_op("transduce::tiles_slopes", mutates_args=())
def slopes_of(
    slopes: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from transduce.attention.tilekernels import tile_slopes

    slopes, query, keys, values = (_packed(part) for part in (slopes, query, keys, values))
    results = tuple(_room(part) for part in (query, keys, values))
    sources, heads, steps, width = query.shape
    parts = (query, keys, values, slopes, *results)
    tile_slopes[(sources * heads,)](
        query, keys, values, mask, slopes, *results, scale, heads, steps, keys.size(2), _jump(mask),
        *(step for part in parts for step in part.stride()[:3]),
        causal=causal, **_shape(steps, keys.size(2), width),
    )  # fmt: skip
    return results[0], results[1], results[2]


@contexts.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return _room(query)


@slopes_of.register_fake
def _(
    slopes: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(query), _room(keys), _room(values)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, keys, values, mask, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(query, keys, values, mask)


@once_differentiable  # type: ignore[untyped-decorator]
def _back(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    return *slopes_of(slopes, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None, None


contexts.register_autograd(_back, setup_context=_keep)


def _packed(part: Tensor) -> Tensor:
    return part if part.stride(3) == 1 else part.contiguous()


def _room(like: Tensor) -> Tensor:
    """B H T K whose heads lie side by side: what is made of a row lies together."""
    sources, heads, steps, width = like.shape
    return like.new_empty(sources, steps, heads, width).transpose(1, 2)


def _jump(mask: Tensor | None) -> int:
    """From the mask of one source to that of the next; 0: all have the same."""
    return 0 if mask is None or mask.size(0) == 1 else mask.stride(0)


def _shape(steps: int, slots: int, width: int) -> dict[str, int]:
    tall, wide = (max(16, 1 << (size - 1).bit_length()) for size in (steps, slots))
    return {"width": width, "tall": tall, "wide": wide, "num_warps": 4 if tall * wide <= 4096 else 8}
