"""Encoded rows in, scores for labels out: one label for the whole input, or one for each row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from transduce.contracts import Head, Rate
from transduce.layers.dense import dense

Pooling = Literal["first", "last", "mean", "max"]


def pool(values: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """B S D -> B D, padding left out."""
    if how == "first":
        return values[:, 0]
    if how == "last":
        last = mask.sum(1) - 1
        return values[torch.arange(len(values), device=values.device), last]
    if how == "max":
        return values.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return (values * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Classifier(Head):
    """one label for the whole input, from its pooled rows"""

    def __init__(self, width: int, labels: int, *, pooling: Pooling = "mean", dropout: Rate = 0.1) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.layers = nn.Sequential(nn.Dropout(dropout), dense(width, width), nn.Tanh(), dense(width, labels))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.layers(pool(values, mask, self.pooling))
        return logits  # B V


class Tagger(Head):
    """one label for each word, from the row where it begins"""

    per_word = True

    def __init__(self, width: int, labels: int, *, dropout: Rate = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(dropout), dense(width, labels))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.layers(values)
        return logits  # B S V


HEADS: dict[str, type[Head]] = {"classifier": Classifier, "tagger": Tagger}
