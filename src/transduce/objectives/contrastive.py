"""Contrastive loss with in-batch negatives."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.contracts import Forward, Loss, Objective
from transduce.flow import Batch, Padded
from transduce.model import PairEmbeddings
from transduce.objectives.cross_entropy import Sharpness


class Contrastive(Objective):
    """InfoNCE with in-batch negatives: the other embeddings of the batch (van den Oord 2018)

    -log softmax_j(cos(a_i, b_j) / temperature) at j = i; `symmetric`: the mean of both directions. Every other row
    with another text is a negative, so unlike sums over tokens this loss changes when a batch is split.
    """

    uses_embeddings = True
    parts = ("right",)

    def __init__(self, *, temperature: Sharpness = 0.05, symmetric: bool = True) -> None:
        self.temperature, self.symmetric = temperature, symmetric

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        assert batch.source is not None, "contrastive training needs source and target"
        found = cast(PairEmbeddings, model(batch))
        cosines = F.normalize(found.source.float(), dim=-1) @ F.normalize(found.target.float(), dim=-1).T  # B B
        logits = cosines / self.temperature
        total = _info_nce(logits, batch.labels)
        if self.symmetric:
            total = (total + _info_nce(logits.T, batch.source)) / 2
        right = (logits.argmax(-1) == torch.arange(len(logits), device=logits.device)).sum()
        return Loss(total, {"right": right})

    def count(self, batch: Batch) -> int:
        return batch.size


def _info_nce(logits: Tensor, candidates: Padded) -> Tensor:
    """The sum of -log softmax at the positive. Candidates with the same text as the positive are not negatives."""
    ids = candidates.values.where(candidates.mask, -1)
    duplicates = (ids[:, None] == ids[None]).all(-1)  # B B
    duplicates.fill_diagonal_(False)
    positive = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits.masked_fill(duplicates, -torch.inf), positive, reduction="sum")
