"""Attention of a decoding step: up to sixteen queries over many keys, as one GPU kernel.

General kernels are made for many queries; for few of them they wait more than they read. Here each source and head is
one program, which reads every key and value once for all queries (the beams).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.kernels.dispatch import has_triton

MAX_QUERIES = 16  # one tile of the matrix unit


def supports(query: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel applies: on a GPU, outside training, for B H T K with few T and a mask."""
    return (
        query.is_cuda
        and has_triton()
        and not torch.is_grad_enabled()
        and mask is not None
        and mask.dtype == torch.bool
        and query.dim() == 4
        and query.size(2) <= MAX_QUERIES
        and query.size(3) in (32, 64, 128)
        and query.dtype in (torch.bfloat16, torch.float16)
    )


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query B H T K, keys and values B G S K (any strides, K contiguous), mask broadcastable to B 1 T S -> B H T K"""
    import triton

    from transduce.kernels.triton.attention_decode import decode_attention as kernel

    sources, heads, steps, width = query.shape
    groups, slots = keys.shape[1:3]
    visible = mask.expand(sources, 1, steps, slots)
    result = torch.empty(sources, steps, heads, width, device=query.device, dtype=query.dtype).transpose(1, 2)
    block = min(128, max(16, triton.next_power_of_2(slots)))
    kernel[(sources * heads,)](
        query, keys, values, visible, result, scale, heads, heads // groups, steps, slots,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], visible.stride(0), *visible.stride()[2:],
        *result.stride()[:3], width=width, block=block, max_queries=MAX_QUERIES, num_warps=4,
    )  # fmt: skip
    return result
