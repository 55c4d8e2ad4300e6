"""Faithfulness of attributions: deletions, completeness, rank correlation, uniform swap, seeds, weight randomisation.

A map says which source rows matter; these measures remove the rows and look, replace the attention, or shuffle the
weights. They are computed for the source and the target that are shown, with the model that is shown.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.errors import InputError
from transduce.explain.attribution import METHODS, AttributionInput, attribute, source_rows
from transduce.explain.interventions import Intervention, heads_of, intervene, shared_copy
from transduce.model import Transducer

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)  # of the source rows, at least one row (DeYoung et al. 2020)
DRAWS = 8  # random orders that a method is compared with
SIGNED = ("input_x_gradient", "integrated_gradients", "occlusion")  # methods whose values are changes of log p
NOTICEABLE = 0.05  # nats: a smaller change of log p is none
SHUFFLES = 3  # networks with shuffled weights that a map is compared with
UNCHANGED = 0.3  # rank correlation with the map of shuffled weights, from which a map is not of what was learned


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
    randomisation: float | None = None  # rank correlation with the map of a decoder with shuffled weights
    seed_variance: float | None = None  # mean Jensen-Shannon divergence (bits) of the maps of several seeds

    @property
    def verdict(self) -> str:
        """How far the map can be trusted, in one sentence."""
        # A source of zeros may suggest the same output by chance: no deletion may matter either.
        if max(map(abs, (self.baseline_change, self.comprehensiveness, self.sufficiency))) < NOTICEABLE:
            return "The output hardly depends on the source: no map of the source explains it."
        if self.randomisation is not None and self.randomisation >= UNCHANGED:
            return "It hardly changes when the weights of the decoder are shuffled: it does not show what was learned."
        # Where random deletions raise log p, marked rows must still cost something to count.
        if self.comprehensiveness <= max(self.random_comprehensiveness, 0) + NOTICEABLE:
            return "Removing the rows it marks changes no more than removing random rows: do not read it."
        share = self.comprehensiveness / max(self.random_comprehensiveness, NOTICEABLE)
        agreement = (
            "" if self.rank_correlation is None else f"; rank correlation with occlusion {self.rank_correlation:.2f}"
        )
        return f"Removing the rows it marks costs {share:.1f} times as much as removing random rows{agreement}."


@dataclass(frozen=True)
class UniformSwap:
    """The rise of the loss, in nats per target token, when cross-attention is replaced by uniform attention.

    About 0: the model does as well without these weights, so they say nothing about it (Wiegreffe & Pinter 2019).
    """

    heads: tuple[tuple[float, ...], ...]  # L H: one head alone
    layers: tuple[float, ...]  # all heads of one layer
    all: float  # all heads of all layers

    def head_verdict(self, layer: int, head: int) -> str:
        """What the swap says about one head."""
        if abs(self.heads[layer][head]) < NOTICEABLE:
            return "This head can be replaced by uniform attention without changing the output: do not read it."
        return f"Uniform attention in this head changes the loss by {self.heads[layer][head]:+.2f} nats per token."

    @property
    def verdict(self) -> str:
        """What the swap says about the attention of the model, in one sentence."""
        if abs(self.all) < NOTICEABLE:
            return "All attention can be replaced by uniform attention without changing the output: do not read it."
        heads = [rise for layer in self.heads for rise in layer]
        needed = sum(abs(rise) >= NOTICEABLE for rise in heads)
        change = f"{'rises' if self.all > 0 else 'falls'} by {abs(self.all):.2f} nats per token"
        more = "" if len(heads) == 1 else f"; {needed} of {len(heads)} heads matter by themselves"
        return f"With uniform attention the loss {change}{more}."

    def to_json(self) -> dict[str, Any]:
        verdicts = [[self.head_verdict(n, head) for head in range(len(layer))] for n, layer in enumerate(self.heads)]
        return {**asdict(self), "verdict": self.verdict, "head_verdicts": verdicts}


def uniform_swap(inputs: AttributionInput) -> UniformSwap | None:
    """The uniform swap of each head, each layer and all of them; None: the model has no such attention."""
    heads = heads_of(inputs.network, "cross")
    if not heads:
        return None

    def rise(layer: int | None = None, head: int | None = None) -> float:
        changed = intervene(inputs.network, [Intervention("uniform", "cross", layer, head)])
        after = replace(inputs, network=changed).log_probabilities(inputs.batch)
        return float((before - after).mean())

    with torch.no_grad():
        before = inputs.log_probabilities(inputs.batch)
        return UniformSwap(
            tuple(tuple(rise(layer, head) for head in range(count)) for layer, count in enumerate(heads)),
            tuple(rise(layer) for layer in range(len(heads))),
            rise(),
        )


def shuffled_decoder(network: Transducer, seed: int) -> Transducer:
    """A network whose decoder, or head, has the values of each weight in random order; the encoder is shared."""
    copied: Transducer = shared_copy(network)
    name = "decoder" if "decoder" in copied._modules else "head"
    part = copy.deepcopy(copied._modules[name])
    assert part is not None
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in part.parameters():
            order = torch.randperm(weight.numel(), generator=chance).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
    copied._modules[name] = part
    return copied


def randomisation(inputs: AttributionInput, method: str, weights: Tensor, shuffles: int = SHUFFLES) -> float | None:
    """Rank correlation of a map (T S) with those of decoders with shuffled weights, the mean (Adebayo et al. 2018)."""
    found = []
    for seed in range(shuffles):
        other = attribute(replace(inputs, network=shuffled_decoder(inputs.network, seed)), method)
        found.append(rank_correlation(_magnitude(method, weights), _magnitude(method, other)))
    known = [one for one in found if one is not None]
    return float(np.mean(known)) if known else None


def seed_variance(maps: Sequence[np.ndarray]) -> float:
    """The mean Jensen-Shannon divergence, in bits (0 to 1), between rows of maps (T S) by models of several seeds."""
    return float(seed_divergences(maps).mean())


def seed_divergences(maps: Sequence[np.ndarray]) -> np.ndarray:
    """P T: the Jensen-Shannon divergence of each row, in bits, for each pair of maps (T S)."""
    shapes = {one.shape for one in maps}
    if len(maps) < 2 or len(shapes) > 1:
        raise InputError(
            f"{len(maps)} maps of the shapes {sorted(shapes)} cannot be compared",
            where="seeds",
            remedy="give two or more runs with the same tokens and the same target",
        )
    shares = [np.abs(one) / np.maximum(np.abs(one).sum(-1, keepdims=True), 1e-12) for one in maps]
    return np.stack([_jensen_shannon(*pair) for pair in combinations(shares, 2)])


def _jensen_shannon(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """T: the divergence of each pair of rows, in bits."""
    middle = (first + second) / 2
    divergence = np.zeros(len(first))
    for one in (first, second):
        ratio = np.divide(one, middle, out=np.ones_like(one), where=one > 0)
        divergence += (one * np.log2(ratio)).sum(-1) / 2
    return divergence


def _magnitude(method: str, weights: Tensor) -> Tensor:
    return weights if method in SIGNED else weights.abs()


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
            removed, kept = _deletions(inputs, _magnitude(name, weights), ends[0].cpu())
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
                randomisation(inputs, name, weights) if name in METHODS else None,
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
