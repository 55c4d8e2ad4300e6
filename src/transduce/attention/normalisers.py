"""Scores in, weights that sum to 1 over the visible rows out."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Normaliser


def _hide(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


class Softmax(Normaliser):
    """exp(e_i) / sum_j exp(e_j)"""

    fusible = True

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return _hide(scores, mask).softmax(-1)


class Sparsemax(Normaliser):
    """the point of the simplex nearest to the scores: many weights are exactly 0 (Martins & Astudillo 2016)"""

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        # The projection is max(e - tau, 0). With sorted scores, tau = (sum of the k largest - 1) / k for the
        # largest k whose k-th score is still above it. Hidden scores are pushed out of any support, but finite.
        lowest = scores.amin(-1, keepdim=True) - 2
        scores = scores if mask is None else torch.where(mask, scores, lowest)
        ordered = scores.sort(-1, descending=True).values
        ranks = torch.arange(1, scores.size(-1) + 1, device=scores.device, dtype=scores.dtype)
        taus = (ordered.cumsum(-1) - 1) / ranks
        support = (ordered > taus).sum(-1, keepdim=True).clamp(min=1)
        weights = (scores - taus.gather(-1, support - 1)).clamp(min=0)
        return weights if mask is None else weights * mask


NORMALISERS: dict[str, type[Normaliser]] = {"softmax": Softmax, "sparsemax": Sparsemax}
