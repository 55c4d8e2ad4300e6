"""Encoders without layers of their own: identity, and multi-source (one encoder per named source, one memory)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from transduce.contracts import Count, Encoder, FrontEnd, Rate
from transduce.errors import InputError
from transduce.flow import PAD, Batch, Memory, masked_mean
from transduce.layers.feed_forward import Dropout, dense


class IdentityEncoder(Encoder):
    """the rows of the front end unchanged, with their mean as the summary (Xu 2015)"""

    capturable = True
    independent_rows = True

    def __init__(self, embedding: FrontEnd, *, width: Count = 256, dropout: Rate = 0.1) -> None:
        super().__init__()
        if embedding.width != width:
            raise InputError(f"the identity encoder keeps rows of width {embedding.width}; they cannot become {width}")
        self.width, self.embedding, self.dropout = width, embedding, Dropout(dropout)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        values = self.dropout(source.values)
        return Memory(values, source.mask, masked_mean(values, source.mask), tokens=batch.source.ids)


class MultiSourceEncoder(Encoder):
    """[W1 m1 + t1 ; W2 m2 + t2 ; ...]: concatenated memories, each with a learned source embedding

    Padding is on the right, so the real rows of all parts are moved to the front of the joint memory. The summary is
    the mean of the projected summaries. A part whose name is not in `Batch.extra` reads `Batch.source`.
    """

    def __init__(self, parts: Mapping[str, Encoder], *, width: Count = 256) -> None:
        super().__init__()
        self.width, self.encoders = width, nn.ModuleDict(parts)
        self.projections = nn.ModuleDict({name: dense(part.width, width) for name, part in parts.items()})
        self.source_embedding = nn.Parameter(nn.init.normal_(torch.empty(len(parts), width), std=width**-0.5))
        self.capturable = all(part.capturable for part in parts.values())

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the sources of a batch"
        memories = {
            name: part(replace(batch, source=batch.extra.get(name, batch.source), extra={}))
            for name, part in self.encoders.items()
        }
        rows = [
            self.projections[name](memory.values) + embedding
            for embedding, (name, memory) in zip(self.source_embedding, memories.items(), strict=True)
        ]
        summary = torch.stack([self.projections[name](memory.summary) for name, memory in memories.items()]).mean(0)
        mask = torch.cat([memory.mask for memory in memories.values()], 1)
        index = torch.arange(mask.size(1), device=mask.device)
        order = torch.where(mask, index, index + mask.size(1)).argsort(1)  # real rows first; ONNX has no stable sort
        values = torch.cat(rows, 1).gather(1, order[..., None].expand(-1, -1, self.width))
        numbers = [torch.full_like(memory.mask, n, dtype=torch.long) for n, memory in enumerate(memories.values())]
        return Memory(
            values,
            mask.gather(1, order),
            summary,
            tokens=_tokens(list(memories.values()), order),
            source_ids=torch.cat(numbers, 1).gather(1, order),
            first_source_rows=next(iter(memories.values())).mask.size(1),
        )

    def grids(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        parts = zip(self.encoders.values(), lengths, strict=True)
        return [grid for part, length in parts for grid in cast(Encoder, part).grids([length])]

    def leading(self) -> list[int]:
        return [count for part in self.encoders.values() for count in cast(Encoder, part).leading()]


def _tokens(memories: Sequence[Memory], order: Tensor) -> Tensor | None:
    """The source token of each row, <pad> in parts that are no texts; None: no part is a text."""
    if all(memory.tokens is None for memory in memories):
        return None
    tokens = [torch.full_like(m.mask, PAD, dtype=torch.long) if m.tokens is None else m.tokens for m in memories]
    return torch.cat(tokens, 1).gather(1, order)
