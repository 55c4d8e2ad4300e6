"""Objectives on sampled outputs: minimum risk training, and imitation learning for edit transducers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from annotated_types import Gt
from torch import Tensor, nn

from transduce.contracts import Count, Forward, Loss, Objective
from transduce.decoders.latent_alignment import COPY, EditTransducerDecoder
from transduce.decoding.search import search
from transduce.decoding.strategies import Sample
from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded, State
from transduce.model import Transducer
from transduce.objectives.cross_entropy import NEVER_READ, Share, Sharpness, inverse_sigmoid, log_probabilities

Ids = Sequence[int]
LONGEST = 2  # maximum length of samples and of roll-ins, as a multiple of the reference
FAR = 1e4  # a distance that is never the smallest
SAME = 1e-3  # costs are sums of whole numbers and multiples of a weight
# The actions of a state in one row: COPY, DELETE and END, then SUBSTITUTE and INSERT with each token.
COPIED, DELETED, ENDED, FIXED = 0, 1, 2, 3


def f1_cost(hypothesis: Ids, reference: Ids) -> float:
    """1 - F1 of the bags of tokens."""
    shared = sum((Counter(hypothesis) & Counter(reference)).values())
    return 1 - 2 * shared / max(len(hypothesis) + len(reference), 1) if hypothesis or reference else 0.0


def edit_cost(hypothesis: Ids, reference: Ids) -> float:
    """Edit distance by the length of the reference (with </s>, so never 0)."""
    before = list(range(len(reference) + 1))
    for number, token in enumerate(hypothesis, 1):
        row = [number]
        for column, wanted in enumerate(reference, 1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (token != wanted)))
        before = row
    return before[-1] / (len(reference) + 1)


COSTS: dict[str, Callable[[Ids, Ids], float]] = {"f1": f1_cost, "edits": edit_cost}


@dataclass(frozen=True)
class Candidates:
    """Candidate outputs of all sources, concatenated; the first of each source is the reference."""

    ids: list[tuple[int, ...]]  # without <s>
    source_index: Tensor  # C: the source
    candidate_index: Tensor  # C: the index among the candidates of its source
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
        wide = replace(batch.select(found.source_index), target=read)
        scores = log_probabilities(model(wide).logits).gather(-1, wide.labels.values[..., None]).squeeze(-1)
        totals = scores.where(wide.labels.mask, 0.0).sum(1)  # C: log p(y | x), now with gradient
        source_index, candidate_index = found.source_index.to(device), found.candidate_index.to(device)
        shape = batch.size, int(candidate_index.max()) + 1  # B M
        table = totals.new_full(shape, -torch.inf).index_put((source_index, candidate_index), self.sharpness * totals)
        costs = totals.new_zeros(shape).index_put((source_index, candidate_index), found.costs.to(device))
        risk = ((table.softmax(-1) * costs).sum(-1) * tokens).sum()
        nll = -totals[candidate_index == 0].sum()
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
        for source, hypotheses in enumerate(drawn):
            reference = tuple(gold.values[source][gold.mask[source]].tolist())
            each = dict.fromkeys([reference, *(hypothesis.ids for hypothesis in hypotheses)])
            ids += each
            facts += [(source, number, measure(_words(one), _words(reference))) for number, one in enumerate(each)]
        source_index, candidate_index, costs = (torch.tensor(column) for column in zip(*facts, strict=True))
        return Candidates(ids, source_index, candidate_index, costs)


def _words(ids: Ids) -> Ids:
    return ids[:-1] if ids[-1] == EOS else ids


@dataclass(frozen=True)
class EditProblem:
    """Sources and references of a batch, as the oracle reads them."""

    source: Tensor  # B S: tokens
    last: Tensor  # B: the row of </s>, at which nothing is left to edit
    target: Tensor  # B J: reference tokens, without </s>
    lengths: Tensor  # B
    copies: Tensor  # B S: rows that may be copied
    substitutes: bool = True


class Expert:
    """Dynamic oracle: the actions that minimise weight x distance(output, reference) + cost(edits) from any state.

    COPY costs nothing, other edits cost 1. A state is the output w so far and a source row s. The distances of w to all
    prefixes of the reference are one row of the Levenshtein table, D(w, y_1 .. y_j); E(s, j) is the cost of turning
    x_s .. into y_j+1 .. . Where errors weigh more than edits, the best completion of w writes exactly y_j+1 .. for a j
    that minimises weight D(w, y_1 .. y_j) + E(s, j); its first edits are the optimal actions.
    """

    def __init__(self, problem: EditProblem, vocabulary: int, weight: float) -> None:
        self.problem, self.vocabulary, self.weight = problem, vocabulary, weight
        columns = torch.arange(problem.target.size(1) + 1, device=problem.target.device)
        self.columns = columns.float()  # J + 1
        self.real = columns <= problem.lengths[:, None]  # B J+1
        self.costs = self._costs()  # B S+1 J+1

    def _costs(self) -> Tensor:
        """E(s, j); far where s is beyond the last row or j beyond the reference."""
        problem, costs = self.problem, torch.full_like(self.real, FAR, dtype=torch.float)
        table = [costs]
        for row in reversed(range(problem.source.size(1))):
            matched = self._matching(problem.source[:, row], problem.copies[:, row])
            diagonal = torch.where(matched, 0.0, 1.0 if problem.substitutes else FAR) + costs[:, 1:]
            edited = nn.functional.pad(diagonal, (0, 1), value=FAR).minimum(costs + 1)
            ended = torch.where(self.columns == problem.lengths[:, None], 0.0, FAR)
            edited = torch.where((problem.last == row)[:, None], ended, edited).where(self.real, FAR)
            # Insertions: E(s, j) is the minimum over j' >= j of what follows from (s, j') without one, plus j' - j.
            inserted = (edited + self.columns).flip(1).cummin(1).values.flip(1) - self.columns
            costs = inserted.where(self.real & (problem.last >= row)[:, None], FAR)
            table.append(costs)
        return torch.stack(table[::-1], 1)

    def _matching(self, tokens: Tensor, allowed: Tensor) -> Tensor:
        """B J: which reference tokens equal these, where they may be copied."""
        return (self.problem.target == tokens[:, None]) & allowed[:, None]

    def start(self) -> Tensor:
        """D(empty, y_1 .. y_j), B J+1"""
        return self.columns.where(self.real, FAR)

    def write(self, distances: Tensor, tokens: Tensor) -> Tensor:
        """The distances after one more token of the output."""
        substituted = distances[:, :-1] + (self.problem.target != tokens[:, None])
        new = torch.cat((distances[:, :1] + 1, substituted.minimum(distances[:, 1:] + 1)), 1)
        return ((new - self.columns).cummin(1).values + self.columns).where(self.real, FAR)

    def optimal(self, distances: Tensor, rows: Tensor) -> Tensor:
        """B A: the optimal actions with the pointer at these rows (B)."""
        every = torch.arange(len(rows), device=rows.device)
        here, below = self.costs[every, rows], self.costs[every, rows + 1]  # B J+1
        total = self.weight * distances + here
        best = (total <= total.min(1, keepdim=True).values + SAME) & self.real
        inner = (rows < self.problem.last)[:, None]
        matched = self._matching(self.problem.source[every, rows], self.problem.copies[every, rows])
        diagonal = best[:, :-1] & inner & self.real[:, 1:]
        copied = diagonal & matched & _equal(below[:, 1:], here[:, :-1])
        replaced = diagonal & _equal(below[:, 1:] + 1, here[:, :-1]) & self.problem.substitutes
        inserted = best[:, :-1] & self.real[:, 1:] & _equal(here[:, 1:] + 1, here[:, :-1])
        deleted = best & inner & _equal(below + 1, here)
        ended = best & ~inner & (self.columns == self.problem.lengths[:, None])
        single = torch.stack((copied.any(1), deleted.any(1), ended.any(1)), 1)
        return torch.cat((single, self._tokens(replaced), self._tokens(inserted)), 1)

    def _tokens(self, positions: Tensor) -> Tensor:
        """B V: the reference tokens at these positions (B J)."""
        found = torch.zeros(len(positions), self.vocabulary, device=positions.device)
        return found.scatter_add(1, self.problem.target, positions.float()) > 0


def _equal(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs() < SAME


@dataclass(frozen=True)
class RollIn:
    """The states that a policy visited: K steps of every row, with the optimal actions of each."""

    written: Tensor  # B T: <s> and the output
    written_before: Tensor  # B K: the number of tokens that were written before
    rows: Tensor  # B K: the pointer
    optimal: Tensor  # B K A
    visited: Tensor  # B K: False after the end of a row
    mistakes: Tensor  # the number of actions that were not optimal


class Imitation(Objective):
    """imitation learning with a dynamic oracle, for edit transducers (Makarov & Clematide 2018)

    The loss of a state is -log of the probability of all optimal actions. States are visited by a roll-in: each action
    is sampled from the model, with probability `rate`, or else from its optimal actions. The rate grows from 0 with
    the updates by the inverse sigmoid of Bengio 2015, half-way in the middle of the share `warmup_ratio` of them. An
    error of the output weighs `distance_weight` edits.
    """

    parts = ("mistakes",)

    def __init__(
        self,
        *,
        rate: Share = 1.0,
        warmup_ratio: Annotated[float, Gt(0)] = 1.0,
        distance_weight: Annotated[float, Gt(2)] = 5.0,
    ) -> None:
        self.rate, self.warmup_ratio, self.distance_weight = rate, warmup_ratio, distance_weight

    def check(self, model: nn.Module) -> None:
        super().check(model)
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, EditTransducerDecoder) or decoder.bridge is None:
            raise InputError(
                "imitation learning trains a transducer over edit actions",
                remedy="set model.decoder: {kind: edit_transducer}, or another objective",
            )

    def at_step(self, step: int, steps: int) -> Imitation:
        now = copy(self)
        now.rate = self.rate * inverse_sigmoid(step, self.warmup_ratio * steps)
        return now

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        network = cast(Transducer, model)
        decoder, state = cast(EditTransducerDecoder, network.decoder), network.start(batch)
        rolled = self._roll_in(decoder, state, batch)
        hidden = decoder.read(rolled.written, state)[0]  # B T W
        visited = hidden.gather(1, rolled.written_before[..., None].expand(-1, -1, hidden.size(-1)))  # B K W
        scores = _joint(*decoder.actions_at(visited, rolled.rows, state))
        right = scores.masked_fill(~rolled.optimal, -torch.inf).logsumexp(-1)  # B K
        return Loss(-right.where(rolled.visited, 0.0).sum(), {"mistakes": rolled.mistakes})

    @torch.no_grad()
    def _roll_in(self, decoder: EditTransducerDecoder, state: State, batch: Batch) -> RollIn:
        problem = _problem(decoder, state, batch)
        expert, limits = Expert(problem, decoder.embedding.size, self.distance_weight), _limits(problem)
        numbers = _random_numbers(batch, limits)  # B K 2
        written = [torch.full_like(problem.last, BOS)[:, None]]
        hidden, state = decoder.read(written[0], state)
        distances, rows, alive = expert.start(), torch.zeros_like(problem.last), problem.last >= 0
        written_before, steps, mistakes = torch.zeros_like(rows), [], torch.zeros((), device=rows.device)
        for number in range(numbers.size(1)):
            alive = alive & (limits > number)
            if not alive.any():
                break
            optimal = expert.optimal(distances, rows)
            steps.append((written_before, rows, optimal, alive))
            scores = _joint(*decoder.actions_at(hidden, rows[:, None], state))[:, 0]
            allowed = optimal | (numbers[:, number, 0] < self.rate)[:, None]
            chosen = _sample(scores.masked_fill(~allowed, -torch.inf), numbers[:, number, 1])
            mistakes += (alive & ~optimal.gather(1, chosen[:, None])[:, 0]).sum()
            alive = alive & (chosen != ENDED)
            writes, moves, tokens = _effect(chosen, problem.source, rows, expert.vocabulary)
            writes, moves = writes & alive, moves & alive
            read, after = decoder.read(tokens[:, None], state)
            hidden, state = read.where(writes[:, None, None], hidden), _where(writes, after, state)
            distances = expert.write(distances, tokens).where(writes[:, None], distances)
            written.append(tokens[:, None])
            written_before, rows = written_before + writes, rows + moves
        before, pointers, optimal, visited = (torch.stack(column, 1) for column in zip(*steps, strict=True))
        tokens = _compact(torch.cat(written, 1), before, written_before)
        return RollIn(tokens, before, pointers, optimal, visited, mistakes)


def _problem(decoder: EditTransducerDecoder, state: State, batch: Batch) -> EditProblem:
    labels, fixed = batch.labels, state.fixed
    target = labels.values.masked_fill(~labels.mask | (labels.values == EOS), 0)[:, :-1]
    last = fixed["edited"].sum(1) - 1
    copies = fixed["allowed"][..., COPY]
    return EditProblem(fixed["tokens"], last, target, labels.mask.sum(1) - 1, copies, decoder.substitute_action)


def _limits(problem: EditProblem) -> Tensor:
    """B: the most actions of a roll-in."""
    return problem.last + LONGEST * (problem.lengths + 1)


def _random_numbers(batch: Batch, limits: Tensor) -> Tensor:
    """B K 2: uniform numbers of each example, which do not depend on the rest of the batch."""
    base, counts = int(torch.randint(2**62, (1,))), limits.tolist()
    seeds = [base + number for number in batch.rows or range(batch.size)]
    rows = [
        torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
        for seed, count in zip(seeds, counts, strict=True)
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(limits.device)


def _where(rows: Tensor, one: State, other: State) -> State:
    """The recurrent cells of one state in these rows (B), those of another elsewhere."""
    pairs = zip(one.past["cells"], other.past["cells"], strict=True)
    cells = tuple(tuple(new.where(rows[:, None], old) for new, old in zip(*layer, strict=True)) for layer in pairs)
    return replace(one, past={**one.past, "cells": cells})


def _joint(actions: Tensor, characters: Tensor) -> Tensor:
    """Log-probabilities of actions (... 5) and characters (... V) -> of all actions with their characters (... A)."""
    copied, substituted, inserted, deleted, ended = actions.unbind(-1)
    single = torch.stack((copied, deleted, ended), -1)
    return torch.cat((single, substituted[..., None] + characters, inserted[..., None] + characters), -1)


def _sample(scores: Tensor, numbers: Tensor) -> Tensor:
    """An action for each row, by the inverse of its distribution function at a uniform number."""
    never = [FIXED + token + side * (scores.size(1) - FIXED) // 2 for token in NEVER_READ for side in (0, 1)]
    scores = scores.index_fill(1, torch.tensor(never, device=scores.device), -torch.inf)
    below = scores.softmax(-1).cumsum(-1)
    last = (scores > -torch.inf).int().mul(torch.arange(1, scores.size(1) + 1, device=scores.device)).argmax(-1)
    return (below <= (numbers * below[:, -1])[:, None]).sum(-1).minimum(last)  # rounding never passes the last one


def _effect(chosen: Tensor, source: Tensor, rows: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each action writes, whether it moves the pointer, and the token it writes; all B."""
    copied = source.gather(1, rows[:, None])[:, 0]
    substitutes = (chosen >= FIXED) & (chosen < FIXED + vocabulary)
    inserts = chosen >= FIXED + vocabulary
    named = (chosen - FIXED).clamp(min=0) % vocabulary
    tokens = torch.where(chosen == COPIED, copied, named)
    return (chosen == COPIED) | substitutes | inserts, (chosen <= DELETED) | substitutes, tokens


def _compact(written: Tensor, written_before: Tensor, total: Tensor) -> Tensor:
    """<s> and the tokens that were written (B T), from one token per step (B K+1) and the counts before each (B K)."""
    after = torch.cat((written_before[:, 1:], total[:, None]), 1)
    result = torch.zeros(len(written), int(total.max()) + 1, dtype=torch.long, device=written.device)
    result[:, 0] = written[:, 0]
    rows, steps = (after > written_before).nonzero(as_tuple=True)
    result[rows, after[rows, steps]] = written[rows, steps + 1]
    return result
