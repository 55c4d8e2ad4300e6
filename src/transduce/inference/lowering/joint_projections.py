"""Joint projections: attention whose projections of the same input are one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.attention.multihead import CrossAttention, MultiHeadAttention
from transduce.attention.self_attention import SelfAttention


def concatenate(layers: list[nn.Linear]) -> nn.Linear:
    """[W1; W2; ...] x + [b1; b2; ...]"""
    first, size = layers[0], sum(layer.out_features for layer in layers)
    joint = nn.Linear(first.in_features, size, first.bias is not None, first.weight.device, first.weight.dtype)
    with torch.no_grad():
        joint.weight.copy_(torch.cat([layer.weight for layer in layers]))
        if first.bias is not None:
            joint.bias.copy_(torch.cat([layer.bias for layer in layers]))
    return joint


def has_projections(attention: MultiHeadAttention) -> bool:
    return all(isinstance(part, nn.Linear) for part in (attention.q_proj, attention.k_proj, attention.v_proj))


class JointSelfAttention(SelfAttention):
    """Self-attention with one projection to queries, keys and values."""

    def __init__(self, plain: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_width = plain.heads, plain.kv_heads, plain.head_width
        self.out_proj, self.attend = plain.out_proj, plain.attend
        self.qkv_proj = concatenate([plain.q_proj, plain.k_proj, plain.v_proj])  # type: ignore[list-item]

    def queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joint = self.qkv_proj(rows).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        query, keys, values = joint.split((self.heads, self.kv_heads, self.kv_heads), 1)  # R . T K
        return query, self.attend.keys(keys), values

    def queries(self, rows: Tensor) -> Tensor:
        return self.queries_keys_values(rows)[0]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries_keys_values(memory)[1:]


class JointCrossAttention(CrossAttention):
    """Cross-attention with one projection of the memory to keys and values."""

    def __init__(self, plain: CrossAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_width = plain.heads, plain.kv_heads, plain.head_width
        self.q_proj, self.out_proj, self.attend = plain.q_proj, plain.out_proj, plain.attend
        self.kv_proj = concatenate([plain.k_proj, plain.v_proj])  # type: ignore[list-item]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_proj(memory).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2)  # B 2G S K
        # Contiguous per source: they are computed once and read at every step.
        keys, values = (part.contiguous() for part in both.chunk(2, 1))
        return self.attend.keys(keys), values
