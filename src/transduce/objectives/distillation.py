"""Word-level knowledge distillation."""

from __future__ import annotations

import torch

from transduce.contracts import Forward, Loss, Objective, Rate
from transduce.flow import Batch
from transduce.objectives.cross_entropy import Share, Sharpness, divergence, likelihood, log_probabilities


class Distillation(Objective):
    """cross-entropy and divergence from the token distributions of a teacher (Hinton 2015, Kim & Rush 2016)

    (1 - weight) * CE + weight * temperature^2 * KL(teacher || student), both softened by the temperature; its square
    keeps the size of the gradient. `teacher` names the run; whoever builds the objective opens it.
    """

    parts = ("nll", "divergence")

    def __init__(
        self,
        opened: Forward,
        *,
        teacher: str = "",
        temperature: Sharpness = 1.0,
        weight: Share = 0.5,
        label_smoothing: Rate = 0.0,  # the distribution of the teacher is smooth already
    ) -> None:
        self.opened, self.teacher = opened, teacher
        self.temperature, self.weight, self.label_smoothing = temperature, weight, label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        gold = batch.labels
        with torch.no_grad():
            wanted = log_probabilities(self.opened(batch).logits.float() / self.temperature)
        logits = model(batch).logits.float()
        found = likelihood(log_probabilities(logits), gold, self.label_smoothing)
        softened = log_probabilities(logits / self.temperature)
        apart = self.temperature**2 * divergence(wanted, softened, gold.mask)
        total = torch.lerp(found.smoothed, apart, self.weight)
        return Loss(total, {"nll": found.nll.detach(), "divergence": apart.detach()})
