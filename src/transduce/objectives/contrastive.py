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
    """each embedding against those of the batch, its partner being the positive (InfoNCE, van den Oord 2018)

    -log softmax_j(cos(a_i, b_j) / temperature) at j = i; `symmetric`: the mean of both directions. Every other row
    is a negative, save one with the same text, so unlike the sums over tokens this one changes when a batch is split.
    """

    uses_embeddings = True
    parts = ("right",)

    def __init__(self, *, temperature: Sharpness = 0.05, symmetric: bool = True) -> None:
        self.temperature, self.symmetric = temperature, symmetric

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        assert batch.source is not None, "a contrast needs both sides"
        found = cast(PairEmbeddings, model(batch))
        fit = F.normalize(found.source.float(), dim=-1) @ F.normalize(found.target.float(), dim=-1).T  # B B
        fit = fit / self.temperature
        total = _told_apart(fit, batch.labels)
        if self.symmetric:
            total = (total + _told_apart(fit.T, batch.source)) / 2
        right = (fit.argmax(-1) == torch.arange(len(fit), device=fit.device)).sum()
        return Loss(total, {"right": right})

    def count(self, batch: Batch) -> int:
        return batch.size


def _told_apart(fit: Tensor, choices: Padded) -> Tensor:
    """The sum of -log softmax at the partner. Duplicates of the partner are no negatives."""
    ids = choices.values.where(choices.mask, -1)
    twins = (ids[:, None] == ids[None]).all(-1)  # B B
    twins.fill_diagonal_(False)
    partner = torch.arange(len(fit), device=fit.device)
    return F.cross_entropy(fit.masked_fill(twins, -torch.inf), partner, reduction="sum")
