"""What every objective is: a model and a batch enter; the loss, as a sum over what is counted, leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from transduce.contracts import Normaliser
from transduce.errors import InputError
from transduce.flow import Batch, Padded, Step
from transduce.kernels.cross_entropy import IGNORED
from transduce.kernels.cross_entropy import cross_entropy as token_cross_entropy

Model = Callable[[Batch], Step]
Share = Annotated[float, Ge(0), Le(1)]
Weight = Annotated[float, Ge(0), Le(1e6)]
Sharpness = Annotated[float, Gt(0), Le(1e6)]  # of a softmax: a temperature, or the inverse of one


@dataclass(frozen=True)
class Loss:
    """Sums, never means: whoever adds slices up divides once, by the count of the whole update."""

    total: Tensor  # scalar: what is differentiated, a sum over what the objective counts
    parts: dict[str, Tensor]  # scalars without gradient, sums over the same; `nll` gives the perplexity


class Objective(ABC):
    """What training makes small. A new one is a class in this folder and a row on its shelf."""

    parts: tuple[str, ...] = ("nll",)  # the names in Loss.parts, known before the first batch
    capturable: bool = False  # True: what it does follows from the shapes of a batch alone, so it can be recorded
    supports_packing: bool = False  # True: it reads packed batches, whose rows hold several pairs
    uses_embeddings: bool = False  # True: the model gives vectors (model.Vectors), not a step of tokens

    @abstractmethod
    def __call__(self, model: Model, batch: Batch) -> Loss: ...

    def check(self, model: nn.Module) -> None:
        """Refuses a model that it cannot train, in words. Called before anything is read."""
        if any(isinstance(part, Normaliser) and part.stochastic for part in model.modules()):
            raise InputError(
                "drawn attention learns by reward alone",
                remedy="set training.objective: {kind: reinforce}, or another normaliser",
            )

    def auxiliary_module(self, width: int) -> nn.Module | None:
        """What is learned beside the model, from rows of its width, and left aside when training ends."""
        return None

    def at_step(self, step: int, steps: int) -> Objective:
        """The objective of this update (from 1) among so many: one that changes as training goes on gives another."""
        return self

    def count(self, batch: Batch) -> int:
        """What the total of this batch is a sum over, known from the batch alone, so processes need not ask."""
        return int(batch.labels.mask.sum())


def cross_entropy(logits: Tensor, gold: Padded, label_smoothing: float, *, reuse_logits: bool = False) -> Likelihood:
    """`likelihood` straight from the scores of tokens (R T V), which are read once and need no copy.

    `reuse_logits`: the caller needs them no more, so their gradient may overwrite them.
    """
    truth = gold.values.where(gold.mask, IGNORED).flatten()  # R*T
    total, nll = token_cross_entropy(logits.flatten(0, 1), truth, label_smoothing, reuse_logits=reuse_logits)
    return Likelihood(total, nll)


@dataclass(frozen=True)
class Likelihood:
    """How well scores foretell the gold tokens: two sums over the real ones."""

    smoothed: Tensor  # with gradient
    nll: Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """R T V, in single precision: the sums made of them lose digits in bf16."""
    return logits.float().log_softmax(-1)


def likelihood(scores: Tensor, gold: Padded, label_smoothing: float) -> Likelihood:
    """(1 - eps) * nll + eps * the mean of -log p over the vocabulary; scores are log-probabilities (R T V)."""
    flat = scores.flatten(0, 1)  # R*T V: both terms are read off it, so V is passed once
    truth = gold.values.where(gold.mask, IGNORED).flatten()  # R*T
    nll = F.nll_loss(flat, truth, ignore_index=IGNORED, reduction="sum")
    if label_smoothing == 0:
        return Likelihood(nll, nll)
    uniform = -flat.mean(-1).where(gold.mask.flatten(), 0.0).sum()
    return Likelihood(torch.lerp(nll, uniform, label_smoothing), nll)


def divergence(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """The sum of KL(one || other) over the real positions; both are log-probabilities (R T V)."""
    terms: Tensor = F.kl_div(other, one, log_target=True, reduction="none").sum(-1)  # R T
    return terms.where(mask, 0.0).sum()
