"""Attention in, the same attention out, with the projections that read the same rows as one matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.attention.multihead import CrossAttention, MultiHeadAttention
from transduce.attention.self_attention import SelfAttention


def joined(layers: list[nn.Linear]) -> nn.Linear:
    """[W1; W2; ...] x + [b1; b2; ...]"""
    first, size = layers[0], sum(layer.out_features for layer in layers)
    made = nn.Linear(first.in_features, size, first.bias is not None, first.weight.device, first.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(torch.cat([layer.weight for layer in layers]))
        if first.bias is not None:
            made.bias.copy_(torch.cat([layer.bias for layer in layers]))
    return made


def projects(attention: MultiHeadAttention) -> bool:
    return all(isinstance(part, nn.Linear) for part in (attention.q_proj, attention.k_proj, attention.v_proj))


class JointSelf(SelfAttention):
    """Queries, keys and values of the same rows by one matrix."""

    def __init__(self, plain: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_width = plain.heads, plain.kv_heads, plain.head_width
        self.out_proj, self.attend = plain.out_proj, plain.attend
        self.all = joined([plain.q_proj, plain.k_proj, plain.v_proj])  # type: ignore[list-item]

    def queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = self.all(rows).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        query, keys, values = every.split((self.heads, self.kv_heads, self.kv_heads), 1)  # R . T K
        return query, self.attend.keys(keys), values

    def queries(self, rows: Tensor) -> Tensor:
        return self.queries_keys_values(rows)[0]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries_keys_values(memory)[1:]


class JointMemory(CrossAttention):
    """Keys and values of a memory by one matrix."""

    def __init__(self, plain: CrossAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_width = plain.heads, plain.kv_heads, plain.head_width
        self.q_proj, self.out_proj, self.attend = plain.q_proj, plain.out_proj, plain.attend
        self.both = joined([plain.k_proj, plain.v_proj])  # type: ignore[list-item]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        both = self.both(memory).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2)  # B 2G S K
        # One source's keys lie together: they are read at every step, and made once.
        keys, values = (part.contiguous() for part in both.chunk(2, 1))
        return self.attend.keys(keys), values
