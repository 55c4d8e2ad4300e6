"""Minimum risk training: expected cost of sampled outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from transduce.contracts import Count, Forward, Loss, Objective
from transduce.decoding.search import search
from transduce.decoding.strategies import Sample
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.model import Transducer
from transduce.objectives.cross_entropy import Share, Sharpness, log_probabilities

Ids = Sequence[int]
LONGEST = 2  # maximum length of samples, as a multiple of the reference


def f1_cost(hypothesis: Ids, reference: Ids) -> float:
    """1 - F1 of the bags of tokens."""
    shared = sum((Counter(hypothesis) & Counter(reference)).values())
    return 1 - 2 * shared / max(len(hypothesis) + len(reference), 1) if hypothesis or reference else 0.0


def edit_cost(hypothesis: Ids, reference: Ids) -> float:
    """Edit distance by the length of the reference (with </s>, so never 0)."""
    before = list(range(len(reference) + 1))
    for number, token in enumerate(hypothesis, 1):
        row = [number]
        for place, wanted in enumerate(reference, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (token != wanted)))
        before = row
    return before[-1] / (len(reference) + 1)


COSTS: dict[str, Callable[[Ids, Ids], float]] = {"f1": f1_cost, "edits": edit_cost}


@dataclass(frozen=True)
class Candidates:
    """Candidate outputs of all sources, concatenated; the first of each source is the reference."""

    ids: list[tuple[int, ...]]  # without <s>
    owners: Tensor  # C: the source
    places: Tensor  # C: the index among the candidates of its source
    costs: Tensor  # C


class MinimumRisk(Objective):
    """the expected cost of samples and reference under the model (Shen 2016)

    sum over S(x) of Q(y) cost(y, gold), Q(y) = p(y)^sharpness, normalised over S(x): the reference and `samples`
    draws, each counted once. A sentence's risk is counted once for each of its tokens, so that it is a mean over the
    same tokens as the cross-entropy: with `edits` it is the expected number of edits. (1 - weight) of the plain
    negative log-probability is added.
    """

    parts = ("nll", "risk")

    def __init__(
        self,
        *,
        samples: Count = 8,
        sharpness: Sharpness = 0.005,
        cost: Literal["f1", "edits"] = "edits",
        weight: Share = 1.0,
    ) -> None:
        self.samples, self.sharpness, self.cost, self.weight = samples, sharpness, cost, weight

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        device, tokens = batch.device, batch.labels.mask.sum(1)  # B
        found = self._candidates(cast(Transducer, model), batch)
        read = Padded.from_rows([[BOS, *ids] for ids in found.ids]).to(device)
        wide = replace(batch.select(found.owners), target=read)
        scores = log_probabilities(model(wide).logits).gather(-1, wide.labels.values[..., None]).squeeze(-1)
        totals = scores.where(wide.labels.mask, 0.0).sum(1)  # C: log p(y | x), now with gradient
        owners, places = found.owners.to(device), found.places.to(device)
        shape = batch.size, int(places.max()) + 1  # B M
        table = totals.new_full(shape, -torch.inf).index_put((owners, places), self.sharpness * totals)
        costs = totals.new_zeros(shape).index_put((owners, places), found.costs.to(device))
        risk = ((table.softmax(-1) * costs).sum(-1) * tokens).sum()
        nll = -totals[places == 0].sum()
        parts = {"nll": nll.detach(), "risk": risk.detach()}
        return Loss(torch.lerp(nll, risk, self.weight), parts)

    def _candidates(self, model: Transducer, batch: Batch) -> Candidates:
        """Samples from the search; a sample depends on the example and the update, not on the rest of the batch."""
        gold, base = batch.labels, int(torch.randint(2**62, (1,)))
        seeds = [base + number for number in batch.rows or range(batch.size)]
        most = LONGEST * gold.mask.sum(1)
        drawn = search(model, replace(batch, target=None), Sample(width=self.samples), max_lengths=most, seeds=seeds)
        measure = COSTS[self.cost]
        ids: list[tuple[int, ...]] = []
        facts: list[tuple[int, int, float]] = []
        for owner, hypotheses in enumerate(drawn):
            reference = tuple(gold.values[owner][gold.mask[owner]].tolist())
            each = dict.fromkeys([reference, *(hypothesis.ids for hypothesis in hypotheses)])
            ids += each
            facts += [(owner, place, measure(_words(one), _words(reference))) for place, one in enumerate(each)]
        owners, places, costs = (torch.tensor(column) for column in zip(*facts, strict=True))
        return Candidates(ids, owners, places, costs)


def _words(ids: Ids) -> Ids:
    return ids[:-1] if ids[-1] == EOS else ids
