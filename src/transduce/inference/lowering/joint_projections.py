"""Attention in, the same attention out, with the projections that read the same rows as one matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHead


def joined(layers: list[nn.Linear]) -> nn.Linear:
    """[W1; W2; ...] x + [b1; b2; ...]"""
    first, size = layers[0], sum(layer.out_features for layer in layers)
    made = nn.Linear(first.in_features, size, first.bias is not None, first.weight.device, first.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(torch.cat([layer.weight for layer in layers]))
        if first.bias is not None:
            made.bias.copy_(torch.cat([layer.bias for layer in layers]))
    return made


def projects(attention: MultiHead) -> bool:
    return all(isinstance(part, nn.Linear) for part in (attention.query, attention.key, attention.value))


class JointSelf(MultiHead):
    """Queries, keys and values of the same rows by one matrix."""

    def __init__(self, plain: MultiHead) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads = plain.heads, plain.kv_heads
        self.output, self.attend = plain.output, plain.attend
        self.all = joined([plain.query, plain.key, plain.value])  # type: ignore[list-item]

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = self.all(rows).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        query, keys, values = every.split((self.heads, self.kv_heads, self.kv_heads), 1)  # R . T K
        return query, self.attend.keys(keys), values

    def ask(self, rows: Tensor) -> Tensor:
        return self.look(rows)[0]

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.look(memory)[1:]


class JointMemory(MultiHead):
    """Keys and values of a memory by one matrix."""

    def __init__(self, plain: MultiHead) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads = plain.heads, plain.kv_heads
        self.query, self.output, self.attend = plain.query, plain.output, plain.attend
        self.both = joined([plain.key, plain.value])  # type: ignore[list-item]

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        both = self.both(memory).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2)  # B 2G S K
        # One source's keys lie together: they are read at every step, and made once.
        keys, values = (part.contiguous() for part in both.chunk(2, 1))
        return self.attend.keys(keys), values
