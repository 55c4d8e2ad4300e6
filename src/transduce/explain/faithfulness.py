"""Faithfulness of attributions: deletion curves, comprehensiveness, sufficiency, completeness, rank correlation.

A map says which source rows matter; these measures remove the rows and look. They are computed for the source and the
target that are shown, with the model that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transduce.explain.attribution import AttributionInput, source_rows

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)  # of the source rows, at least one row (DeYoung et al. 2020)
DRAWS = 8  # random orders that a method is compared with
SIGNED = ("input_x_gradient", "integrated_gradients", "occlusion")  # methods whose values are changes of log p
NOTICEABLE = 0.05  # nats: a smaller change of log p is none


@dataclass(frozen=True)
class Faithfulness:
    """Measures of one attribution; log-probabilities in nats, means over the target tokens.

    `comprehensiveness`: the fall of log p when the top rows are removed; larger is better. `sufficiency`: its fall when
    all other rows are removed; smaller is better. Both are means over `FRACTIONS`.
    """

    comprehensiveness: float
    sufficiency: float
    random_comprehensiveness: float  # of rows in random order
    random_sufficiency: float
    deletion_curve: tuple[float, ...]  # the fall of log p at each of `FRACTIONS`
    rank_correlation: float | None  # Spearman, with occlusion; None: one row, or all rows equal
    completeness_error: float | None  # |sum - (log p - log p of the baseline)|, of integrated gradients
    baseline_change: float  # log p minus log p of the baseline: what all rows together are worth

    @property
    def verdict(self) -> str:
        """How far the map can be trusted, in one sentence."""
        if abs(self.baseline_change) < NOTICEABLE:
            return "The output hardly depends on the source: no map of the source explains it."
        if self.comprehensiveness <= self.random_comprehensiveness + NOTICEABLE:
            return "Removing the rows it marks changes no more than removing random rows: do not read it."
        share = self.comprehensiveness / max(self.random_comprehensiveness, NOTICEABLE)
        agreement = (
            "" if self.rank_correlation is None else f"; rank correlation with occlusion {self.rank_correlation:.2f}"
        )
        return f"Removing the rows it marks costs {share:.1f} times as much as removing random rows{agreement}."


def measure(
    inputs: AttributionInput, attributions: Mapping[str, Tensor], occlusion: Tensor, seed: int = 1
) -> dict[str, Faithfulness]:
    """The measures of each attribution (T S). `occlusion` is the reference of the rank correlation."""
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        rows = source_rows(inputs)
        whole_and_none = torch.tensor([[1.0], [0.0]], device=inputs.batch.device).expand(-1, rows)
        ends = inputs.scaled_log_probabilities(whole_and_none)
        chance = torch.Generator().manual_seed(seed)
        orders = torch.rand(DRAWS, len(inputs.ids), rows, generator=chance)
        random = [_deletions(inputs, order, ends[0].cpu()) for order in orders]
        random_fall, random_kept = (float(np.mean([one[part].mean() for one in random])) for part in (0, 1))
        found = {}
        for name, weights in attributions.items():
            removed, kept = _deletions(inputs, weights if name in SIGNED else weights.abs(), ends[0].cpu())
            change = (ends[0] - ends[1]).cpu()
            error = (weights.sum(1) - change).abs().mean().item() if name == "integrated_gradients" else None
            found[name] = Faithfulness(
                removed.mean().item(),
                kept.mean().item(),
                random_fall,
                random_kept,
                tuple(removed.mean(0).tolist()),
                rank_correlation(weights, occlusion),
                error,
                change.mean().item(),
            )
    return found


def rank_correlation(first: Tensor, second: Tensor) -> float | None:
    """The mean over target tokens of Spearman's correlation of two attributions."""
    found = [one for pair in zip(first.numpy(), second.numpy(), strict=True) if (one := spearman(*pair)) is not None]
    return float(np.mean(found)) if found else None


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Pearson's correlation of the ranks; ties have their mean rank. None where one side has no order."""
    ranks = [_ranks(np.asarray(side, np.float64)) for side in (first, second)]
    centred = [one - one.mean() for one in ranks]
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return None if norm == 0 else float((centred[0] * centred[1]).sum() / norm)


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return ((ends - counts + ends - 1) / 2)[inverse]


def _deletions(inputs: AttributionInput, weights: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """T F, T F: the fall of log p of each target token without its top rows, and with these alone."""
    tokens, rows = weights.shape
    order = weights.argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(-1)  # T S: 0 for the top row
    counts = torch.tensor([max(1, round(fraction * rows)) for fraction in FRACTIONS])
    top = ranks[:, None] < counts[:, None]  # T F S
    scales = torch.cat(((~top).flatten(0, 1), top.flatten(0, 1))).float().to(inputs.batch.device)
    scores = inputs.scaled_log_probabilities(scales).cpu().view(2, tokens, len(FRACTIONS), tokens)
    own = scores[:, torch.arange(tokens), :, torch.arange(tokens)].transpose(0, 1)  # 2 T F: each token's own deletion
    falls = whole[:, None] - own
    return falls[0], falls[1]
