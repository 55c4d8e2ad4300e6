"""Cross-entropy, likelihood and divergence, as sums over the unmasked labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from transduce.flow import Padded
from transduce.kernels.cross_entropy import IGNORED
from transduce.kernels.cross_entropy import cross_entropy as token_cross_entropy

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
