"""Beam update: appends the selected tokens, moves finished hypotheses out of the beam, prunes hopeless ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transduce.contracts import LogitsProcessor, Selection, Strategy
from transduce.decoding.logits_processors import SuppressTokens
from transduce.decoding.search_state import BeamState, FinishedHypotheses
from transduce.decoding.strategies import length_power
from transduce.flow import BOS, EOS, PAD, TopK
from transduce.kernels import beam_update as kernel

NEVER_GENERATED = SuppressTokens(tokens=[PAD, BOS])


def update_from_top_k(strategy: Strategy, beams: BeamState, best: TopK, num_results: int) -> BeamState:
    """Selects among the best tokens of each row and updates the beams."""
    shape = (*beams.totals.shape, -1)
    selection = strategy.select_top_k(beams.totals, best.log_probs.view(shape), best.tokens.view(shape))
    assert selection.indices is not None
    log_probs = best.log_probs.view(len(beams.totals), -1).gather(1, selection.indices)  # B N
    return update(strategy, replace(beams, state=best.state), selection, log_probs, num_results)


def update_from_logits(
    strategy: Strategy, processors: Sequence[LogitsProcessor], beams: BeamState, logits: Tensor, num_results: int
) -> BeamState:
    """Selects a token for every row (logits R V) and updates the beams."""
    log_probs = logits.log_softmax(-1, dtype=torch.float)
    allowed = NEVER_GENERATED.apply(log_probs, beams.history)  # in place: a suppressed token is never selected
    for processor in processors:
        allowed = processor.apply(allowed, beams.history.flatten(0, 1))
    noise = None
    if beams.noise is not None:
        index = beams.steps[:, None, None].expand(-1, 1, beams.noise.size(2))
        noise = beams.noise.gather(1, index).squeeze(1)  # B N
    selection = strategy.select(beams.totals, allowed.view(*beams.totals.shape, -1), noise)
    log_probs = log_probs.view(*beams.totals.shape, -1)
    if selection.parents.size(1) == 1:
        selected = log_probs.squeeze(1).gather(1, selection.tokens)
    else:
        sources = torch.arange(len(log_probs), device=log_probs.device)[:, None]
        selected = log_probs[sources, selection.parents, selection.tokens]
    return update(strategy, beams, selection, selected, num_results)


def update(
    strategy: Strategy, beams: BeamState, selection: Selection, log_probs: Tensor, num_results: int
) -> BeamState:
    """The beams before the next step, given the selected tokens with their log-probabilities (B N).

    `num_results`: finished hypotheses of each source that the search has to return.
    """
    if kernel.supports(beams, selection, strategy.width) and (power := length_power(strategy)) is not None:
        new = kernel.beam_update(beams, selection, log_probs, power, num_results)
        state = beams.state if new.history.size(1) == 1 else beams.state.reorder(new.rows)
        names = ("history", "token_scores", "totals", "lengths", "steps")
        finished = FinishedHypotheses(*new.finished)
        return replace(beams, state=state, finished=finished, **{name: getattr(new, name) for name in names})
    beams, rows = _append(beams, selection, log_probs)
    beams = _move_finished(beams, strategy)
    if rows is not None and beams.totals.size(1) > strategy.width:
        beams, rows = _keep_best(beams, rows, strategy.width)
    beams = _prune_hopeless(beams, strategy, num_results)
    return beams if rows is None else replace(beams, state=beams.state.reorder(rows))


def _append(beams: BeamState, selection: Selection, log_probs: Tensor) -> tuple[BeamState, Tensor | None]:
    """Appends the selected tokens; the row order for the decoder state, None where it does not change."""
    sources, width = selection.parents.shape
    history, token_scores, rows = beams.history, beams.token_scores, None
    if width > 1:
        offsets = torch.arange(sources, device=selection.parents.device)[:, None] * beams.totals.size(1)
        rows = (selection.parents + offsets).flatten()  # R
        index = selection.parents[..., None].expand(-1, -1, history.size(-1))
        history, token_scores = history.gather(1, index), token_scores.gather(1, index)
    columns = max(beams.max_columns, history.size(-1))
    kept = slice(1 if history.size(-1) == columns else 0, None)
    extended = replace(
        beams,
        history=torch.cat((history[..., kept], selection.tokens[..., None]), -1),
        token_scores=torch.cat((token_scores[..., kept], log_probs[..., None]), -1),
        totals=selection.totals,
        lengths=beams.lengths + 1,
        steps=(beams.steps + 1).clamp(max=columns - 1),  # a replayed graph may step on after the end of a search
    )
    return extended, rows


def _keep_best(beams: BeamState, rows: Tensor, width: int) -> tuple[BeamState, Tensor]:
    """The N best unfinished candidates, where a strategy selected more."""
    order = beams.totals.topk(width, 1).indices  # B N
    index = order[..., None].expand(-1, -1, beams.history.size(-1))
    kept = replace(
        beams,
        history=beams.history.gather(1, index),
        token_scores=beams.token_scores.gather(1, index),
        totals=beams.totals.gather(1, order),
    )
    return kept, rows.view(beams.totals.shape).gather(1, order).flatten()


def _move_finished(beams: BeamState, strategy: Strategy) -> BeamState:
    """Moves rows that ended with </s> or reached the maximal length to the finished hypotheses."""
    alive = beams.totals > -torch.inf
    ended = alive & (beams.history[..., -1] == EOS)
    over = ended | (alive & (beams.lengths >= beams.max_lengths)[:, None])
    if over.is_cpu and not over.any():  # on a GPU the test would wait for the device
        return beams
    lengths = beams.lengths[:, None].expand_as(over)
    ranks = strategy.rank(beams.totals, lengths - beams.prefix_lengths[:, None]).masked_fill(~over, -torch.inf)
    candidates = FinishedHypotheses(beams.history, beams.token_scores, ranks, lengths, ended)
    finished = beams.finished.join(candidates).best(strategy.width, strategy.prefer_complete)
    return replace(beams, finished=finished, totals=beams.totals.masked_fill(over, -torch.inf))


def _prune_hopeless(beams: BeamState, strategy: Strategy, num_results: int) -> BeamState:
    """Drops rows that cannot come among the best `num_results`; a source is done when it has no row left.

    With a bound that is never too low this does not change the results: a row that takes the place of a dropped one
    has a lower total still.
    """
    finished = beams.finished
    if finished.complete.is_cpu and not (finished.complete.sum(1) >= num_results).any():
        return beams
    ranks = finished.ranks.masked_fill(~finished.complete, -torch.inf)
    worst = ranks.topk(num_results, 1).values[:, -1:]  # B 1: the rank that a new hypothesis must exceed
    lengths = strategy.bound_lengths(beams.lengths - beams.prefix_lengths, beams.max_lengths - beams.prefix_lengths)
    hopeless = strategy.bound(beams.totals, lengths) <= worst  # B N
    if not strategy.exact:
        hopeless = hopeless.all(1, keepdim=True)
    return replace(beams, totals=beams.totals.masked_fill(hopeless, -torch.inf))
