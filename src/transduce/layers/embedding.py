"""Ids in, vectors out; and, at the other end, vectors in, scores for every id out."""

from __future__ import annotations

import math

from torch import Tensor, nn

from transduce.flow import PAD


class Embedding(nn.Module):
    """One vector an id. Stored with deviation D ** -0.5, as the output layer needs it, and scaled up on reading."""

    def __init__(self, size: int, width: int, *, scaled: bool = True) -> None:
        super().__init__()
        self.size, self.width, self.scale = size, width, math.sqrt(width) if scaled else 1.0
        self.table = nn.Embedding(size, width, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        nn.init.zeros_(self.table.weight[PAD].detach())

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) * self.scale  # ... D


class Output(nn.Module):
    """Scores for every id: W x + b; W may be the table of an embedding (Press & Wolf 2017)."""

    def __init__(self, width: int, size: int, tied: Embedding | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(width, size)
        nn.init.normal_(self.layer.weight, std=width**-0.5)
        nn.init.zeros_(self.layer.bias)
        if tied is not None:
            self.layer.weight = tied.table.weight

    def forward(self, values: Tensor) -> Tensor:
        logits: Tensor = self.layer(values)
        return logits  # ... V
