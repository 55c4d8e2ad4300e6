"""A model and a batch enter; the loss, as a sum over what is counted, leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.flow import Batch, Step

IGNORED = -100  # where the target is padding
Model = Callable[[Batch], Step]


@dataclass(frozen=True)
class Loss:
    """Sums, never means: whoever adds slices up divides once, by the count of the whole update."""

    total: Tensor  # scalar: what is differentiated
    count: int  # what the total is a sum over: real target tokens
    parts: dict[str, Tensor]  # scalars without gradient, sums over the same count; `nll` gives the perplexity


class Objective(ABC):
    """What training makes small. A new one is a class here and a row in the table below."""

    parts: tuple[str, ...] = ("nll",)  # the names in Loss.parts, known before the first batch

    @abstractmethod
    def __call__(self, model: Model, batch: Batch) -> Loss: ...

    def count(self, batch: Batch) -> int:
        """What the total of this batch is a sum over, known from the batch alone, so processes need not ask."""
        return int(batch.gold.mask.sum())


class CrossEntropy(Objective):
    """Label-smoothed cross-entropy: (1 - eps) * nll + eps * the mean of -log p over the vocabulary."""

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        gold = batch.gold
        logits = model(batch).logits.float()  # R T V; the sums below lose digits in bf16
        scores = logits.flatten(0, 1).log_softmax(-1)  # R*T V: both terms are read off it, so V is passed once
        truth = gold.values.where(gold.mask, IGNORED).flatten()  # R*T
        nll = F.nll_loss(scores, truth, ignore_index=IGNORED, reduction="sum")
        total = nll
        if self.label_smoothing > 0:
            uniform = -scores.mean(-1).where(gold.mask.flatten(), 0.0).sum()
            total = torch.lerp(nll, uniform, self.label_smoothing)
        return Loss(total, self.count(batch), {"nll": nll.detach()})


OBJECTIVES: dict[str, type[Objective]] = {"cross_entropy": CrossEntropy}
