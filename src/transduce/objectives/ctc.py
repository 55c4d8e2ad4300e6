"""Scores of every memory row and a shorter target enter; the cost of all paths that spell the target leaves."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from transduce.flow import PAD, Padded
from transduce.objectives.objective import Loss, log_probabilities


class Ctc:
    """-log of the sum over all paths that read the target once blanks and repeats are left out (Graves 2006)

    <pad> is the blank: no target contains it. A target that does not fit into its rows has no path; it adds nothing
    to the total and is counted in `impossible`.
    """

    def __call__(self, logits: Tensor, mask: Tensor, target: Padded) -> Loss:
        """logits (B S V), mask (B S), target (B T) without <s> and </s>."""
        scores = log_probabilities(logits).transpose(0, 1)  # S B V
        rows, lengths = mask.sum(1), target.mask.sum(1)  # B
        total = F.ctc_loss(scores, target.values, rows, lengths, blank=PAD, reduction="sum", zero_infinity=True)
        twice = (target.values[:, 1:] == target.values[:, :-1]) & target.mask[:, 1:]  # a blank must stand between
        impossible = (rows < lengths + twice.sum(1)).sum()
        return Loss(total, {"nll": total.detach(), "impossible": impossible})
