"""A model and a batch of sources in, the best hypotheses of each source out: the only token loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.contracts import Choice, Rule, Strategy
from transduce.decoding.rules import Ban
from transduce.flow import BOS, EOS, PAD, Batch, Hypothesis, Padded, State
from transduce.model import Transducer

NEVER = Ban([PAD, BOS])  # no strategy may choose these


@dataclass
class Live:
    """The rows still being extended. Axis 0 is the sources that are left, axis 1 their beams."""

    state: State
    logits: Tensor  # B*N V: for the next token
    history: Tensor  # B N U: a forced prefix is padded on the left
    token_scores: Tensor  # B N U: the model's own log-probabilities, untouched by rules
    totals: Tensor  # B N: what the search adds up, -inf for a dead row
    sources: Tensor  # B: which source of the batch
    lengths: Tensor  # B: tokens so far, a forced prefix included
    longest: Tensor  # B: most tokens
    noise: Tensor | None  # B L N

    def keep(self, rows: Tensor) -> None:
        beams = self.totals.size(1)
        self.state = self.state.keep(rows)
        self.logits = self.logits.view(-1, beams, self.logits.size(-1))[rows].flatten(0, 1)
        self.history, self.token_scores = self.history[rows], self.token_scores[rows]
        self.totals, self.sources = self.totals[rows], self.sources[rows]
        self.lengths, self.longest = self.lengths[rows], self.longest[rows]
        self.noise = None if self.noise is None else self.noise[rows]


@torch.inference_mode()
def search(
    model: Transducer,
    batch: Batch,
    strategy: Strategy,
    *,
    longest: Tensor,  # B: most tokens for each source
    rules: Sequence[Rule] = (),
    prefix: Padded | None = None,  # B P: tokens that every hypothesis begins with
    seeds: Sequence[int] | None = None,  # one a source, for strategies that draw
) -> list[list[Hypothesis]]:
    """Best first, N for each source (fewer where the space is smaller)."""
    live = _begin(model, batch, strategy, longest, prefix, seeds)
    finished: list[list[Hypothesis]] = [[] for _ in range(batch.size)]
    cut: list[list[Hypothesis]] = [[] for _ in range(batch.size)]
    drawn = 0
    while len(live.sources):
        noise = None if live.noise is None else live.noise[:, drawn]
        choice = _choose(live, strategy, rules, noise)
        rows = _extend(live, choice)
        drawn += 1
        _set_aside(live, strategy, finished, cut)
        left = _left(live, strategy, finished)
        live.state = live.state if rows is None else live.state.reorder(rows)
        # Leaving costs a copy of all that stay, so sources leave together, a quarter of the batch at a time.
        if int(left.sum()) <= 0.75 * len(left):
            live.keep(left.nonzero().flatten())
        else:
            live.totals[~left] = -torch.inf
        if len(live.sources):
            step = model.advance(live.history[..., -1].reshape(-1, 1), live.state)
            live.state, live.logits = step.state, step.logits[:, -1]
    best = [done + rest for done, rest in zip(map(_sorted, finished), map(_sorted, cut), strict=True)]
    return [hypotheses[: strategy.width] for hypotheses in best]


def _sorted(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.rank)


def _begin(
    model: Transducer,
    batch: Batch,
    strategy: Strategy,
    longest: Tensor,
    prefix: Padded | None,
    seeds: Sequence[int] | None,
) -> Live:
    size, device = batch.size, batch.device
    first = torch.full((size, 1), BOS, device=device)
    begin = Padded(first, torch.ones_like(first, dtype=torch.bool))
    if prefix is not None:
        begin = Padded(torch.cat((first, prefix.values), 1), torch.cat((begin.mask, prefix.mask), 1))
    step = model.advance(begin.values, model.start(batch), None if prefix is None else begin.mask)
    last = begin.mask.sum(1) - 1  # B
    logits = step.logits[torch.arange(size, device=device), last]
    history, scores = _forced(step.logits, begin)
    totals = strategy.begin(size).to(device) + scores.sum(1, keepdim=True)
    noise = None
    if strategy.random:
        noise = _draw(seeds or range(size), int(longest.max()), strategy.width).to(device)
    return Live(
        step.state.repeat(strategy.width),
        logits.repeat_interleave(strategy.width, 0),
        history[:, None].expand(-1, strategy.width, -1),
        scores[:, None].expand(-1, strategy.width, -1),
        totals,
        torch.arange(size, device=device),
        last,
        longest.to(device),
        noise,
    )


def _forced(logits: Tensor, begin: Padded) -> tuple[Tensor, Tensor]:
    """The prefix without <s> and the log-probabilities of its tokens, both padded on the left: B P."""
    tokens, real = begin.values[:, 1:], begin.mask[:, 1:]
    scores = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    shift = (~real).sum(1, keepdim=True)
    index = (torch.arange(tokens.size(1), device=tokens.device) - shift) % max(tokens.size(1), 1)
    moved = real.gather(1, index)
    return tokens.gather(1, index).masked_fill(~moved, PAD), scores.gather(1, index).masked_fill(~moved, 0.0)


def _draw(seeds: Sequence[int], steps: int, width: int) -> Tensor:
    """Each source has a generator of its own, so that its neighbours in the batch cannot change its samples."""
    return torch.stack(
        [torch.rand(steps, width, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )  # B L N


def _choose(live: Live, strategy: Strategy, rules: Sequence[Rule], noise: Tensor | None) -> Choice:
    live.logits = live.logits.float().log_softmax(-1)  # R V
    scores = NEVER.apply(live.logits.clone(), live.history)
    for rule in rules:
        scores = rule.apply(scores, live.history.flatten(0, 1))
    return strategy.choose(live.totals, scores.view(*live.totals.shape, -1), noise)


def _extend(live: Live, choice: Choice) -> Tensor | None:
    """Appends the chosen tokens; gives the rows to reorder the state by, None where the order stays."""
    sources, beams = choice.parents.shape
    offsets = torch.arange(sources, device=choice.parents.device)[:, None] * beams
    rows = (choice.parents + offsets).flatten()  # R
    chosen = live.logits[rows, choice.tokens.flatten()].view(sources, beams, 1)
    index = choice.parents[..., None].expand(-1, -1, live.history.size(-1))
    live.history = torch.cat((live.history.gather(1, index), choice.tokens[..., None]), -1)
    live.token_scores = torch.cat((live.token_scores.gather(1, index), chosen), -1)
    live.totals, live.lengths = choice.totals, live.lengths + 1
    return None if beams == 1 else rows


def _set_aside(live: Live, strategy: Strategy, finished: list[list[Hypothesis]], cut: list[list[Hypothesis]]) -> None:
    """Moves rows that ended, or reached the greatest length, out of the beam."""
    alive = live.totals > -torch.inf
    ended = alive & (live.history[..., -1] == EOS)
    over = ended | (alive & (live.lengths >= live.longest)[:, None])
    if not over.any():
        return
    facts = (live.sources[:, None], live.lengths[:, None], ended, live.totals)
    numbers = [fact.expand_as(over)[over].tolist() for fact in facts]
    rows = zip(*numbers, live.history[over].tolist(), live.token_scores[over].tolist(), strict=True)
    for source, length, whole, total, ids, scores in rows:
        hypothesis = Hypothesis(tuple(ids[-length:]), tuple(scores[-length:]), strategy.rank(total, length), whole)
        (finished if whole else cut)[source].append(hypothesis)
    live.totals = live.totals.masked_fill(over, -torch.inf)


def _left(live: Live, strategy: Strategy, finished: list[list[Hypothesis]]) -> Tensor:
    """B: which sources go on: some row lives, and could still enter the best N."""
    best = strategy.bound(live.totals, live.longest).amax(1)  # B
    floors = [_floor(finished[source], strategy.width) for source in live.sources.tolist()]
    return best > torch.tensor(floors, device=best.device, dtype=best.dtype)


def _floor(hypotheses: list[Hypothesis], width: int) -> float:
    """The rank a newcomer must beat: the N-th best so far."""
    return -math.inf if len(hypotheses) < width else sorted(one.rank for one in hypotheses)[-width]
