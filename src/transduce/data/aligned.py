"""Batches of pairs enter; they leave with the links between their tokens, for an attention to follow."""

from __future__ import annotations

from dataclasses import replace

import torch

from transduce.data.batching import Batches, Position
from transduce.data.links import LINKS, token_links
from transduce.data.text import Tokenizer
from transduce.flow import Batch, Padded


class LinkedBatches:
    """Batches whose `extra["alignment"]` holds the links of their tokens (B M 2)."""

    def __init__(self, plain: Batches, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
        self.plain, self.tokenizers = plain, tokenizers

    def at(self, position: Position) -> Batch:
        batch = self.plain.at(position)
        examples = [self.plain.store.example(row) for row in batch.rows]
        rows = [
            token_links(one.extra.get(LINKS, ""), one.source, one.target or "", self.tokenizers) for one in examples
        ]
        counts, most = torch.tensor([len(row) for row in rows]), max(map(len, rows))
        values = torch.zeros(len(rows), most, 2, dtype=torch.long)  # B M 2
        for place, row in enumerate(rows):
            values[place, : len(row)] = torch.tensor(row, dtype=torch.long).view(-1, 2)
        links = Padded(values, torch.arange(most) < counts[:, None])
        return replace(batch, extra={**batch.extra, LINKS: links})

    def after(self, position: Position) -> Position:
        return self.plain.after(position)

    def batches_in(self, epoch: int) -> int:
        return self.plain.batches_in(epoch)

    def padding(self, epoch: int) -> float:
        return self.plain.padding(epoch)
