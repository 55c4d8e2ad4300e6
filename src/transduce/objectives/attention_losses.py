"""Losses on cross-attention: guided alignment, doubly stochastic attention, coverage, REINFORCE."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Decoder, Forward, Loss, Normaliser, Objective, Rate
from transduce.errors import InputError
from transduce.flow import Attention, Batch, Padded, Step
from transduce.layers.feed_forward import dense
from transduce.objectives.cross_entropy import Weight, likelihood, log_probabilities

SMALLEST = 1e-9  # a sparse normaliser may give an aligned word no weight


class AttentionLoss(Objective):
    """Base of losses on the cross-attention of one layer: of one head, or of the mean of all heads."""

    layer: int
    head: int | None

    def check(self, model: nn.Module) -> None:
        super().check(model)
        decoder = getattr(model, "decoder", None)
        layers, heads = decoder.attention_shape if isinstance(decoder, Decoder) else (0, 0)
        if not layers:
            raise InputError(
                "this objective needs a decoder that attends to the source",
                remedy="give a recurrent decoder context: bahdanau or luong, or take another objective",
            )
        if not -layers <= self.layer < layers or (self.head is not None and not -heads <= self.head < heads):
            raise InputError(
                f"layer {self.layer}, head {self.head}: the decoder attends in {layers} layers of {heads} heads",
                remedy="leave them out: the mean of all heads of the last layer",
            )

    def weights(self, attention: Attention | None) -> Tensor:
        """B T S"""
        if attention is None or attention.cross is None:
            raise InputError("this objective needs a decoder that attends to the source")
        heads = attention.cross[:, self.layer].float()  # B H T S
        return heads.mean(1) if self.head is None else heads[:, self.head]


class GuidedAlignment(AttentionLoss):
    """cross-entropy of tokens and of cross-attention against gold word alignments (Chen 2016)

    CE - weight * sum_t sum_s A_ts log a_ts. A row of A is uniform over the links of target token t; tokens without
    a link are left out. a is one head, or the mean of all heads, of one layer. The batch has the links as
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
        weights = self.weights(step.attention)
        links = gold_weights(batch.extra["alignment"], weights)
        alignment = -(links * weights.clamp_min(SMALLEST).log()).sum()
        parts = {"nll": found.nll.detach(), "alignment": alignment.detach()}
        return Loss(found.smoothed + self.weight * alignment, parts)


def gold_weights(links: Padded, like: Tensor) -> Tensor:
    """Alignment links (B M 2) -> B T S: a uniform distribution over the source tokens of each aligned target token."""
    rows, columns = links.mask.nonzero(as_tuple=True)
    source, target = links.values[rows, columns].unbind(-1)
    gold = torch.zeros_like(like)
    gold[rows, target, source] = 1.0
    return gold / gold.sum(-1, keepdim=True).clamp_min(1.0)


class AttentionPenalty(AttentionLoss):
    """cross-entropy with a doubly stochastic or coverage penalty on cross-attention (Xu 2015, See 2017)

    CE + weight * P, with a_ts the attention of one layer: one head, or the mean of all. Over the real rows of each pair

        doubly_stochastic   P = sum_s (1 - sum_t a_ts)^2                every row receives attention 1 in total
        coverage            P = sum_t sum_s min(a_ts, sum_{t' < t} a_t's)   no row is attended to again
    """

    parts = ("nll", "penalty")

    def __init__(
        self,
        *,
        penalty: Literal["doubly_stochastic", "coverage"] = "doubly_stochastic",
        weight: Weight = 1.0,
        layer: int = -1,
        head: int | None = None,
        label_smoothing: Rate = 0.1,
    ) -> None:
        self.penalty, self.weight, self.label_smoothing = penalty, weight, label_smoothing
        self.layer, self.head = layer, head

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        step = cast(Any, model)(batch, with_attention=True)
        found = likelihood(log_probabilities(step.logits), batch.labels, self.label_smoothing)
        assert batch.source is not None
        weights = self.weights(step.attention) * batch.decoder_inputs.mask[..., None]
        # Memory rows need not be source tokens: real rows are those with some weight.
        real = batch.source.mask if batch.source.ids is not None else weights.detach().sum(1) > 0
        cost = PENALTIES[self.penalty](weights, real)
        parts = {"nll": found.nll.detach(), "penalty": cost.detach()}
        return Loss(found.smoothed + self.weight * cost, parts)


def doubly_stochastic(weights: Tensor, mask: Tensor) -> Tensor:
    """weights (B T S), 0 after the end of a target; mask (B S) of the source -> the sum over all pairs."""
    return (1 - weights.sum(1)).square().where(mask, 0.0).sum()


def coverage(weights: Tensor, mask: Tensor) -> Tensor:
    """The same arguments; masked rows have no weight and no cost."""
    before = weights.cumsum(1) - weights  # B T S
    return weights.minimum(before).where(mask[:, None], 0.0).sum()


PENALTIES = {"doubly_stochastic": doubly_stochastic, "coverage": coverage}


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
