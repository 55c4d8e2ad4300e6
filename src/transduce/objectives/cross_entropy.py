"""Cross-entropy, wait-k, R-Drop, scheduled sampling and word-level distillation, as sums over the unmasked labels."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from transduce.contracts import Count, Forward, Loss, Objective, Rate
from transduce.decoding.simultaneous import wait_k_logits
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded
from transduce.kernels.cross_entropy import IGNORED
from transduce.kernels.cross_entropy import cross_entropy as token_cross_entropy
from transduce.model import DecoderModel

Share = Annotated[float, Ge(0), Le(1)]
Weight = Annotated[float, Ge(0), Le(1e6)]
Sharpness = Annotated[float, Gt(0), Le(1e6)]  # of a softmax: a temperature, or the inverse of one


def cross_entropy(logits: Tensor, labels: Padded, label_smoothing: float, *, reuse_logits: bool = False) -> Likelihood:
    """Smoothed and plain negative log-likelihood from logits (R T V), in one pass.

    `reuse_logits`: the gradient may overwrite the logits, which the caller no longer needs.
    """
    targets = labels.values.where(labels.mask, IGNORED).flatten()  # R*T
    total, nll = token_cross_entropy(logits.flatten(0, 1), targets, label_smoothing, reuse_logits=reuse_logits)
    return Likelihood(total, nll)


@dataclass(frozen=True)
class Likelihood:
    """Two sums over the unmasked labels."""

    smoothed: Tensor  # with label smoothing, with gradient
    nll: Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax (R T V) in single precision: sums over it lose digits in bf16."""
    return logits.float().log_softmax(-1)


def likelihood(scores: Tensor, labels: Padded, label_smoothing: float) -> Likelihood:
    """(1 - eps) * nll + eps * the mean of -log p over the vocabulary; scores are log-probabilities (R T V)."""
    flat = scores.flatten(0, 1)  # R*T V: both terms are read off it, so V is passed once
    targets = labels.values.where(labels.mask, IGNORED).flatten()  # R*T
    nll = F.nll_loss(flat, targets, ignore_index=IGNORED, reduction="sum")
    if label_smoothing == 0:
        return Likelihood(nll, nll)
    uniform = -flat.mean(-1).where(labels.mask.flatten(), 0.0).sum()
    return Likelihood(torch.lerp(nll, uniform, label_smoothing), nll)


def divergence(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """The sum of KL(one || other) over the real positions; both are log-probabilities (R T V)."""
    terms: Tensor = F.kl_div(other, one, log_target=True, reduction="none").sum(-1)  # R T
    return terms.where(mask, 0.0).sum()


NEVER_READ = [PAD, BOS, EOS]  # never an input inside a sentence


class CrossEntropy(Objective):
    """label-smoothed cross-entropy under teacher forcing (Szegedy 2016)"""

    capturable = True
    supports_packing = True

    def __init__(self, *, label_smoothing: Rate = 0.1) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        found = cross_entropy(model(batch).logits, batch.labels, self.label_smoothing, reuse_logits=True)
        return Loss(found.smoothed, {"nll": found.nll})


class WaitK(Objective):
    """cross-entropy of wait-k: label t is predicted from the first k + t - 1 source tokens (Ma 2019)

    For simultaneous translation. Every prefix of the source is encoded, and the target so far is read with it, as in
    decoding/simultaneous.py: an update takes as many passes as the longest source has tokens, less k, and one more.
    """

    def __init__(self, *, k: Count = 3, label_smoothing: Rate = 0.1) -> None:
        self.k, self.label_smoothing = k, label_smoothing

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not isinstance(model, DecoderModel):
            raise InputError(
                "wait_k trains a decoder that writes while the source arrives, and this model has none",
                remedy="leave the objective out, or set model.decoder",
            )

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        found = cross_entropy(wait_k_logits(model, batch, self.k), batch.labels, self.label_smoothing)
        return Loss(found.smoothed, {"nll": found.nll})


class RDrop(Objective):
    """cross-entropy of two passes with different dropout, plus their divergence (Wu 2021)

    Half of the paper's sum, so that its first term has the size of one cross-entropy:
    1/2 [CE_1 + CE_2 + weight * 1/2 (KL(p_1 || p_2) + KL(p_2 || p_1))].
    """

    parts = ("nll", "divergence")
    capturable = True
    supports_packing = True

    def __init__(self, *, weight: Weight = 5.0, label_smoothing: Rate = 0.1) -> None:
        self.weight, self.label_smoothing = weight, label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        gold = batch.labels
        first, second = (log_probabilities(model(batch).logits) for _ in range(2))
        one, two = (likelihood(scores, gold, self.label_smoothing) for scores in (first, second))
        apart = (divergence(first, second, gold.mask) + divergence(second, first, gold.mask)) / 2
        total = (one.smoothed + two.smoothed + self.weight * apart) / 2
        parts = {"nll": ((one.nll + two.nll) / 2).detach(), "divergence": apart.detach()}
        return Loss(total, parts)


class ScheduledSampling(Objective):
    """some decoder inputs are replaced by predictions (Bengio 2015; two passes: Mihaylova 2019)

    The first pass is teacher forced and without gradient; each token the second pass reads is, with probability
    `rate`, the prediction of the first pass. One path for every decoder. For a recurrent one it is an approximation:
    a prediction of the first pass was made after gold tokens, never after another prediction.

    The rate may grow with the updates: `linear` from 0 to `rate` over the share `warmup_ratio` of them; `sigmoid` as
    rate * (1 - k / (k + exp(i / k))) at update i, the paper's inverse sigmoid, half-way in the middle of that share.
    """

    def __init__(
        self,
        *,
        rate: Share = 0.25,
        schedule: Literal["none", "linear", "sigmoid"] = "none",
        warmup_ratio: Annotated[float, Gt(0), Le(1)] = 1.0,
        choice: Literal["best", "sample"] = "best",
        label_smoothing: Rate = 0.1,
    ) -> None:
        self.rate, self.schedule, self.warmup_ratio = rate, schedule, warmup_ratio
        self.choice, self.label_smoothing = choice, label_smoothing

    def at_step(self, step: int, steps: int) -> ScheduledSampling:
        if self.schedule == "none":
            return self
        warmup = self.warmup_ratio * steps
        grown = min(1.0, step / warmup) if self.schedule == "linear" else inverse_sigmoid(step, warmup)
        now = copy(self)
        now.rate = self.rate * grown
        return now

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        logits = model(self._mixed(model, batch)).logits
        found = cross_entropy(logits, batch.labels, self.label_smoothing)  # the labels stay the same
        return Loss(found.smoothed, {"nll": found.nll})

    @torch.no_grad()
    def _mixed(self, model: Forward, batch: Batch) -> Batch:
        """The batch with predictions among the target tokens. </s> is never an input, so it may be replaced too."""
        logits = model(batch).logits.float()  # B T V: of the token at t + 1, given the target up to t
        logits = logits.index_fill(-1, torch.tensor(NEVER_READ, device=logits.device), -torch.inf)
        predicted = _sample(logits) if self.choice == "sample" else logits.argmax(-1)  # B T
        assert batch.target is not None
        target, mask = batch.target.values, batch.target.mask
        replaced = (torch.rand(predicted.shape) < self.rate).to(predicted.device) & mask[:, 1:]
        mixed = torch.cat((target[:, :1], predicted.where(replaced, target[:, 1:])), 1)
        return replace(batch, target=Padded(mixed, mask))


def inverse_sigmoid(step: int, warmup: float) -> float:
    """1 - k / (k + exp(i / k)), which is 1/2 at i = k log k: k is such that this is the middle of the warm-up."""
    k = middle = max(warmup / 2, 1.0)
    for _ in range(50):  # Newton's method on k log k = middle
        k = (k + middle) / (math.log(k) + 1)
    return 1 / (1 + k * math.exp(-step / k))


def _sample(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(-1).flatten(0, 1), 1).view(logits.shape[:2])


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
