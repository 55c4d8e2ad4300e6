"""Guided alignment: cross-attention supervised by word alignments."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from transduce.contracts import Forward, Loss, Objective, Rate
from transduce.errors import InputError
from transduce.flow import Attention, Batch, Padded
from transduce.objectives.likelihood import Weight, likelihood, log_probabilities

SMALLEST = 1e-9  # a sparse normaliser may give an aligned word no weight


class GuidedAlignment(Objective):
    """cross-entropy of tokens and of cross-attention against gold word alignments (Chen 2016)

    CE - weight * sum_t sum_s A_ts log a_ts. A row of A is even over the links of target token t; tokens without a
    link are left out. a is one head, or the mean of all heads, of one layer. The batch brings the links as
    `extra["alignment"]`: pairs (source position, target position), B M 2, the first real target token being 0.
    """

    parts = ("nll", "alignment")

    def __init__(
        self, *, weight: Weight = 0.5, layer: int = -1, head: int | None = None, label_smoothing: Rate = 0.1
    ) -> None:
        self.weight, self.layer, self.head, self.label_smoothing = weight, layer, head, label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        if "alignment" not in batch.extra:
            raise InputError("guided alignment needs the links of every pair", remedy="set `alignment` of the corpus")
        step = cast(Any, model)(batch, with_attention=True)
        found = likelihood(log_probabilities(step.logits), batch.labels, self.label_smoothing)
        weights = self._weights(step.attention)  # B T S
        links = gold_weights(batch.extra["alignment"], weights)
        astray = -(links * weights.clamp_min(SMALLEST).log()).sum()
        parts = {"nll": found.nll.detach(), "alignment": astray.detach()}
        return Loss(found.smoothed + self.weight * astray, parts)

    def _weights(self, attention: Attention | None) -> Tensor:
        if attention is None or attention.cross is None:
            raise InputError("guided alignment needs a decoder that attends to the source")
        heads = attention.cross[:, self.layer].float()  # B H T S
        return heads.mean(1) if self.head is None else heads[:, self.head]


def gold_weights(links: Padded, like: Tensor) -> Tensor:
    """Alignment links (B M 2) -> B T S: a uniform distribution over the source tokens of each aligned target token."""
    rows, places = links.mask.nonzero(as_tuple=True)
    source, target = links.values[rows, places].unbind(-1)
    gold = torch.zeros_like(like)
    gold[rows, target, source] = 1.0
    return gold / gold.sum(-1, keepdim=True).clamp_min(1.0)
