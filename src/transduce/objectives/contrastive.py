"""Two summaries of each example enter; the cost of telling the pairs apart leaves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.objectives.objective import Loss, Sharpness


class Contrastive:
    """each summary must find its partner among those of the batch (InfoNCE, van den Oord 2018)

    -log softmax_j(cos(a_i, b_j) / temperature) at j = i; `symmetric`: the mean of both directions. Every other row
    is a negative, so unlike the sums over tokens this one changes when a batch is split.
    """

    def __init__(self, *, temperature: Sharpness = 0.05, symmetric: bool = False) -> None:
        self.temperature, self.symmetric = temperature, symmetric

    def __call__(self, one: Tensor, other: Tensor) -> Loss:
        """Rows of `one` and `other` (both B D) belong together; the count is the rows."""
        fit = F.normalize(one.float(), dim=-1) @ F.normalize(other.float(), dim=-1).T / self.temperature  # B B
        partner = torch.arange(len(fit), device=fit.device)
        total = F.cross_entropy(fit, partner, reduction="sum")
        if self.symmetric:
            total = (total + F.cross_entropy(fit.T, partner, reduction="sum")) / 2
        right = (fit.argmax(-1) == partner).sum()
        return Loss(total, len(fit), {"contrast": total.detach(), "right": right})
