"""Top-k: the best scores of each row, and the best tokens of each row of logits with their log-probabilities."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, native_kernels
from transduce.kernels.native.inference import MAX_K
from transduce.kernels.native.inference import top_k as native_top_k

GROUP = 128  # scores whose maximum is found first
TILE = 1024  # logits that one Triton program scans


def top_k_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the k best of the last axis: ... V -> ... M. Which of equal scores comes first is open."""
    best = scores.topk(k)
    return best.values, best.indices


def _accepts_native(scores: Tensor, k: int) -> bool:
    plain = scores.dtype == torch.float32 and scores.is_contiguous() and native_kernels(scores) is not None
    return plain and 0 < k <= min(MAX_K, scores.size(-1))


def _accepts_grouped(scores: Tensor, k: int) -> bool:
    return scores.size(-1) // GROUP > 4 * k


def grouped_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The groups with the best maxima first: only they can hold one of the best scores. The axis is read once."""
    size = scores.size(-1)
    groups = size // GROUP
    head = scores[..., : groups * GROUP].unflatten(-1, (groups, GROUP))
    chosen = head.amax(-1).topk(k).indices  # ... M
    found = head.gather(-2, chosen[..., None].expand(*chosen.shape, GROUP))  # ... M GROUP
    indices = chosen[..., None] * GROUP + torch.arange(GROUP, device=scores.device)
    rest = torch.arange(groups * GROUP, size, device=scores.device).expand(*scores.shape[:-1], -1)
    values = torch.cat((found.flatten(-2), scores[..., groups * GROUP :]), -1)
    best, index = values.topk(k)
    return best, torch.cat((indices.flatten(-2), rest), -1).gather(-1, index)


TOP_K = Operation(
    "top_k",
    top_k_reference,
    (
        Backend("native", _accepts_native, native_top_k),
        Backend("grouped", _accepts_grouped, grouped_top_k),
    ),
)


def top_k_tokens_reference(logits: Tensor, k: int, suppressed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens (R M) of the k best logits (R V) not suppressed; -inf where there are fewer."""
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float))
    ids = torch.tensor(suppressed, dtype=torch.long, device=logits.device)
    best = log_probs.index_fill(1, ids, -torch.inf).topk(min(k, log_probs.size(1)))
    missing = (0, k - best.values.size(1))
    return F.pad(best.values, missing, value=-torch.inf), F.pad(best.indices, missing)


def _accepts_triton(logits: Tensor, k: int, suppressed: tuple[int, ...]) -> bool:
    return dispatch.fused_decoding(logits)


def triton_top_k_tokens(logits: Tensor, k: int, suppressed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """By two kernels: the best of each tile, then the best of those."""
    from transduce.kernels.triton.decode_step import merge_top_k, partial_top_k

    rows, size = logits.shape
    parts, slots = -(-size // TILE), _power_of_two(k, 2)
    maxima, sums = logits.new_empty(2, rows, parts, dtype=torch.float)
    values = logits.new_empty(rows, parts, k, dtype=torch.float)
    ids = logits.new_empty(rows, parts, k, dtype=torch.int32)
    partial_top_k[(parts, rows)](
        logits, _on_device(suppressed, logits.device), values, ids, maxima, sums, size, len(suppressed),
        count=k, slots=slots, tile=TILE,
    )  # fmt: skip
    log_probs = logits.new_empty(rows, k, dtype=torch.float)
    tokens = logits.new_empty(rows, k, dtype=torch.long)
    merge_top_k[(rows,)](
        values, ids, maxima, sums, log_probs, tokens, parts,
        count=k, slots=slots, candidates=_power_of_two(parts * k, 16), part_tile=_power_of_two(parts, 16),
    )  # fmt: skip
    return log_probs, tokens


@cache  # for good: captured steps, which cannot copy from the host, read these addresses
def _on_device(suppressed: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(suppressed or (-1,), device=device)


def _power_of_two(size: int, least: int) -> int:
    """The smallest power of two not below the size, nor below `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


TOP_K_TOKENS = Operation(
    "top_k_tokens", top_k_tokens_reference, (Backend("triton", _accepts_triton, triton_top_k_tokens),)
)
