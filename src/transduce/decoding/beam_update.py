"""A search and what may be said next in, the search after the choice out: appended, set aside, given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transduce.contracts import LogitsProcessor, Selection, Strategy
from transduce.decoding.constraints import Ban
from transduce.decoding.search_state import Live, Paths
from transduce.flow import BOS, EOS, PAD, TopK
from transduce.kernels import beam_update as settling

NEVER = Ban([PAD, BOS])  # no strategy may choose these


def pick(strategy: Strategy, live: Live, found: TopK, enough: int) -> Live:
    """Chooses among what was proposed for each row, and sets aside what ended."""
    shape = (*live.totals.shape, -1)
    choice = strategy.pick(live.totals, found.log_probs.view(shape), found.tokens.view(shape))
    assert choice.places is not None
    chosen = found.log_probs.view(len(live.totals), -1).gather(1, choice.places)  # B N
    return advance(strategy, replace(live, state=found.state), choice, chosen, enough)


def choose(strategy: Strategy, rules: Sequence[LogitsProcessor], live: Live, logits: Tensor, enough: int) -> Live:
    """Chooses a token for every row (logits R V), and sets aside what ended."""
    logs = logits.log_softmax(-1, dtype=torch.float)
    allowed = NEVER.apply(logs, live.history)  # forbidding may write into it: what is forbidden is never chosen
    for rule in rules:
        allowed = rule.apply(allowed, live.history.flatten(0, 1))
    noise = None
    if live.noise is not None:
        index = live.drawn[:, None, None].expand(-1, 1, live.noise.size(2))
        noise = live.noise.gather(1, index).squeeze(1)  # B N
    choice = strategy.choose(live.totals, allowed.view(*live.totals.shape, -1), noise)
    chosen = logs.view(*live.totals.shape, -1)
    if choice.parents.size(1) == 1:
        return advance(strategy, live, choice, chosen.squeeze(1).gather(1, choice.tokens), enough)
    sources = torch.arange(len(chosen), device=chosen.device)[:, None]
    return advance(strategy, live, choice, chosen[sources, choice.parents, choice.tokens], enough)


def advance(strategy: Strategy, live: Live, choice: Selection, chosen: Tensor, enough: int) -> Live:
    """What was chosen, with the log-probabilities of its tokens (B N), as the search before its next step."""
    if settling.suits(live, strategy, choice):
        new = settling.settled(live, choice, chosen, strategy, enough)
        state = live.state if new.history.size(1) == 1 else live.state.reorder(new.rows)
        names = ("history", "scores", "totals", "lengths", "drawn")
        finished = Paths(*new.finished)
        return replace(live, state=state, finished=finished, **{name: getattr(new, name) for name in names})
    live, rows = _extend(live, choice, chosen)
    live = _set_aside(live, strategy)
    if rows is not None and live.totals.size(1) > strategy.width:
        live, rows = _narrowed(live, rows, strategy.width)
    live = _settle(live, strategy, enough)
    return live if rows is None else replace(live, state=live.state.reorder(rows))


def _extend(live: Live, choice: Selection, chosen: Tensor) -> tuple[Live, Tensor | None]:
    """Appends the chosen tokens; gives the rows to reorder the state by, None where the order stays."""
    sources, beams = choice.parents.shape
    history, scores, rows = live.history, live.scores, None
    if beams > 1:
        offsets = torch.arange(sources, device=choice.parents.device)[:, None] * live.totals.size(1)
        rows = (choice.parents + offsets).flatten()  # R
        index = choice.parents[..., None].expand(-1, -1, history.size(-1))
        history, scores = history.gather(1, index), scores.gather(1, index)
    room = max(live.most, history.size(-1))
    full = slice(1 if history.size(-1) == room else 0, None)
    extended = replace(
        live,
        history=torch.cat((history[..., full], choice.tokens[..., None]), -1),
        scores=torch.cat((scores[..., full], chosen[..., None]), -1),
        totals=choice.totals,
        lengths=live.lengths + 1,
        drawn=(live.drawn + 1).clamp(max=room - 1),  # a recorded search steps on after its end
    )
    return extended, rows


def _narrowed(live: Live, rows: Tensor, width: int) -> tuple[Live, Tensor]:
    """The best of the candidates that go on, where a strategy chose more of them than it keeps."""
    order = live.totals.topk(width, 1).indices  # B N
    index = order[..., None].expand(-1, -1, live.history.size(-1))
    kept = replace(
        live,
        history=live.history.gather(1, index),
        scores=live.scores.gather(1, index),
        totals=live.totals.gather(1, order),
    )
    return kept, rows.view(live.totals.shape).gather(1, order).flatten()


def _set_aside(live: Live, strategy: Strategy) -> Live:
    """Moves rows that ended, or reached the greatest length, out of the beam and among the finished."""
    alive = live.totals > -torch.inf
    ended = alive & (live.history[..., -1] == EOS)
    over = ended | (alive & (live.lengths >= live.longest)[:, None])
    if over.is_cpu and not over.any():  # a look costs nothing where there is no device to wait for
        return live
    lengths = live.lengths[:, None].expand_as(over)
    ranks = strategy.rank(live.totals, lengths - live.begun[:, None]).masked_fill(~over, -torch.inf)
    found = live.finished.join(Paths(live.history, live.scores, ranks, lengths, ended))
    found = found.best(strategy.width, strategy.whole_first)
    return replace(live, finished=found, totals=live.totals.masked_fill(over, -torch.inf))


def _settle(live: Live, strategy: Strategy, enough: int) -> Live:
    """A row is given up when it could not come to be among the best `enough`; a source is done when no row lives.

    With a bound that is never too low this changes nothing that is asked for: what takes the place of such a row has a
    lower total still.
    """
    finished = live.finished
    if finished.complete.is_cpu and not (finished.complete.sum(1) >= enough).any():
        return live
    ranks = finished.ranks.masked_fill(~finished.complete, -torch.inf)
    floor = ranks.topk(enough, 1).values[:, -1:]  # B 1: the rank a newcomer must beat
    horizon = strategy.horizon(live.lengths - live.begun, live.longest - live.begun)
    hopeless = strategy.bound(live.totals, horizon) <= floor  # B N
    if not strategy.exact:
        hopeless = hopeless.all(1, keepdim=True)
    return replace(live, totals=live.totals.masked_fill(hopeless, -torch.inf))
