"""A few queries over many keys in, their contexts out: the attention of a step of generation, as one GPU kernel.

General kernels are made for many queries at once; for one to sixteen of them they wait more than they read. Here each
source and head is one program, which reads every key and value once, for all queries (the beams) together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.kernels.dispatch import has_triton

MOST = 16  # queries: one tile of the matrix unit


def suits(query: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can be used: on a GPU, outside training, for B H T K with few T and a mask."""
    return (
        query.is_cuda
        and has_triton()
        and not torch.is_grad_enabled()
        and mask is not None
        and mask.dtype == torch.bool
        and query.dim() == 4
        and query.size(2) <= MOST
        and query.size(3) in (32, 64, 128)
        and query.dtype in (torch.bfloat16, torch.float16)
    )


def attend_few(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query B H T K, keys and values B G S K (any strides, K contiguous), mask broadcastable to B 1 T S -> B H T K"""
    import triton

    from transduce.kernels.triton.attention_decode import few_queries

    sources, heads, steps, width = query.shape
    groups, slots = keys.shape[1:3]
    seen = mask.expand(sources, 1, steps, slots)
    result = torch.empty(sources, steps, heads, width, device=query.device, dtype=query.dtype).transpose(1, 2)
    block = min(128, max(16, triton.next_power_of_2(slots)))
    few_queries[(sources * heads,)](
        query, keys, values, seen, result, scale, heads, heads // groups, steps, slots,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], seen.stride(0), *seen.stride()[2:],
        *result.stride()[:3], width=width, block=block, most=MOST, num_warps=4,
    )  # fmt: skip
    return result
