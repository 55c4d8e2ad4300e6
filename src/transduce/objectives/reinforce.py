"""REINFORCE for sampled (hard) attention."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Decoder, Forward, Loss, Normaliser, Objective, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Step
from transduce.layers.feed_forward import dense
from transduce.objectives.cross_entropy import Weight, likelihood, log_probabilities


class Reinforce(Objective):
    """cross-entropy, and the score-function gradient of sampled attention with a baseline (Williams 1992, Xu 2015)

    CE - weight * sum_t (r_t - b_t) log p(row_t) + sum_t (b_t - r_t)^2 - entropy * sum_t H(p_t), without gradient
    through r - b in the second term. With weight 1 its expectation is the gradient of the expected cross-entropy; the
    entropy term keeps the samples diverse. The reward r_t is the mean log-probability of the gold tokens from step t
    on (`to_go`), or of step t alone (`step`): less variance, and exact where a sample does not affect later steps
    (luong without input feeding). The baseline b_t is a linear map of the input of the output layer at step t - 1: at
    step t that input depends on the sample, and a baseline that depends on the sample would bias the gradient.
    """

    parts = ("nll", "baseline", "entropy")

    def __init__(
        self,
        *,
        weight: Weight = 1.0,
        reward: Literal["to_go", "step"] = "to_go",
        entropy: Weight = 0.002,  # per sample, in nats; from the code of Xu 2015
        label_smoothing: Rate = 0.0,  # 0: the reward is the plain log-probability
    ) -> None:
        self.weight, self.reward, self.entropy, self.label_smoothing = weight, reward, entropy, label_smoothing
        self.baseline: nn.Module | None = None

    def auxiliary_module(self, width: int) -> nn.Module:
        self.baseline = dense(width, 1)
        return self.baseline

    def check(self, model: nn.Module) -> None:
        decoder = getattr(model, "decoder", None)
        drawn = [part for part in model.modules() if isinstance(part, Normaliser) and part.stochastic]
        if not drawn or not isinstance(decoder, Decoder) or not decoder.attention_shape[0]:
            raise InputError(
                "reinforce trains sampled attention, and this model has none",
                remedy="set model.decoder.context: {kind: luong, normaliser: sampled}, or another objective",
            )

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        step = cast(Any, model)(batch, with_attention=True)
        scores = log_probabilities(step.logits)
        found = likelihood(scores, batch.labels, self.label_smoothing)
        mask = batch.labels.mask
        truth = scores.gather(-1, batch.labels.values[..., None]).squeeze(-1).where(mask, 0.0)  # B T
        left = _from_here(mask.to(truth)) if self.reward == "to_go" else mask.to(truth)
        total = _from_here(truth) if self.reward == "to_go" else truth
        reward = (total / left.clamp(min=1)).detach()  # B T: per remaining token
        guess = self._guess(step, reward)
        missed = (guess - reward).square().where(mask, 0.0).sum()
        advantage = ((reward - guess.detach()) * left).where(mask, 0.0)
        # Row sums are exactly 1 and have the gradient of log p(row); subtracting 1 keeps the loss value.
        draws = step.attention.cross.float().sum(-1)  # B L H T
        taught = (advantage[:, None, None] * (draws - draws.detach())).sum()
        entropy = step.attention.entropy  # B L H T
        spread = missed.new_zeros(()) if entropy is None else (entropy.float() * mask[:, None, None]).sum()
        parts = {"nll": found.nll.detach(), "baseline": missed.detach(), "entropy": spread.detach()}
        return Loss(found.smoothed - self.weight * taught + missed - self.entropy * spread, parts)

    def _guess(self, step: Step, reward: Tensor) -> Tensor:
        """B T: the baseline before each sample; 0 without a baseline."""
        if self.baseline is None:
            return torch.zeros_like(reward)
        assert step.hidden is not None
        before = F.pad(step.hidden.detach()[:, :-1], (0, 0, 1, 0))  # zeros before the first step
        return cast(Tensor, self.baseline(before)).squeeze(-1).to(reward)


def _from_here(values: Tensor) -> Tensor:
    """Suffix sums: B T."""
    return values.flip(1).cumsum(1).flip(1)
