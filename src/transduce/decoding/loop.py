"""A model and a batch of sources in, the best hypotheses of each source out: the only token loop.

Where a step is recorded, every tensor of the search keeps its shape and nothing waits for the host, so a step is one
function of fixed buffers: it runs as it is, or replayed as a graph (see graphs.py). On a CPU histories grow. They are
padded on the left: the newest token is always the last column. A model that proposes (contracts.py) is asked for the
best next tokens of each row that goes on; any other gives the scores of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from transduce.attention.positions import places
from transduce.contracts import Asked, Choice, Rule, Strategy
from transduce.decoding import settling
from transduce.decoding.beginning import bare_search, draw, first_scores, rounded
from transduce.decoding.graphs import Graphs, tensors_of
from transduce.decoding.paths import Given, Live, Paths
from transduce.decoding.rules import Ban
from transduce.flow import BOS, EOS, PAD, Batch, Hypothesis, Padded, Proposal, State, map_tensors
from transduce.model import Transducer
from transduce.native.choices import MOST

NEVER = Ban([PAD, BOS])  # no strategy may choose these
LEAVE = 0.75  # on a GPU sources leave together, once no more than this share of them goes on: leaving copies the rest
HALF = 0.5  # the same where a model leaves rows out that are done: they are only carried along
ROOM = 32  # tokens that a search asks room for at first; it doubles


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
    best: int | None = None,  # hypotheses of each source that are brought back; None: N
    graphs: Graphs | None = None,  # recorded steps of this model, on devices that have them
) -> list[list[Hypothesis]]:
    """Best first, for each source (fewer than asked for where the space is smaller)."""
    most = int(longest.max())
    noise = draw(seeds or range(batch.size), most, strategy.width).to(batch.device) if strategy.random else None
    wide = 0 if graphs is None and batch.device.type == "cpu" else most
    given = Given(batch, longest.to(batch.device), prefix, noise, most, wide)
    results: list[list[Hypothesis]] = [[] for _ in range(batch.size)]
    sources = torch.arange(batch.size)
    # A recorded step needs all its room at once; elsewhere room that may never be used would only be read in vain.
    room = min(most, ROOM - 1)  # and <s>
    proposing = model.proposes and 0 < strategy.wanted <= MOST
    enough = min(best or strategy.width, strategy.width) if strategy.exact else strategy.width
    if graphs is not None:  # few different shapes, so that a recording is used again
        most = room = -(-most // ROOM) * ROOM
        given = rounded(given, most, places(model))

    def begin(asked: Given) -> Live:
        if proposing and prefix is None and (banned := _banned(rules, 0)) is not None:
            live = bare_search(model, strategy, asked, room)
            return propose(live, torch.full((live.totals.numel(), 1), BOS, device=batch.device), banned)
        return _choose(strategy, rules, *first_scores(model, strategy, asked, room), enough)

    def barred(said: int | None) -> tuple[int, ...] | None:
        """What may not be said after so many tokens: all that tells one step from another; None: more does."""
        return _banned(rules, said if prefix is None else None) if proposing else None

    def step(now: Live, said: int | None = None) -> Live:
        tokens = now.history[..., -1].reshape(-1, 1)
        if (banned := barred(said)) is not None:
            return propose(now, tokens, banned)
        read = model.advance(tokens, now.state)
        return _choose(strategy, rules, replace(now, state=read.state), read.logits[:, -1], enough)

    def propose(now: Live, tokens: Tensor, banned: tuple[int, ...]) -> Live:
        asked = Asked(strategy.wanted, banned, (now.totals > -torch.inf).flatten())
        return _pick(strategy, now, model.propose(tokens, now.state, asked), enough)

    if graphs is not None:
        asks = (strategy, tuple(rules), most, enough)
        last = graphs.run(begin, step, given, key=asks, steady=model.steady, kind=barred)
        _collect(last.finished.keep(sources), sources, results, best)
        return results
    live = begin(given)
    live = replace(live, state=_owned(live.state, batch))
    for taken in count(1):
        going = live.going
        left, size = int(going.sum()), len(going)
        # On a CPU a row that is done costs as much as one that goes on, and only what fills its place is copied. But a
        # model that proposes leaves such rows out by itself.
        if left < size if going.is_cpu and not proposing else left <= (HALF if proposing else LEAVE) * size:
            done, rows = (~going).nonzero().flatten(), _closed_up(going)
            _collect(live.finished.keep(done), sources[done.cpu()], results, best)
            live, sources = live.keep(rows), sources[rows.cpu()]
            if not len(sources):
                return results
        if taken == room:
            live = replace(live, state=model.reserve(live.state, 1 + room, strategy.width))
            room += 1 + room
        live = step(live, None if prefix is not None else taken)
    raise AssertionError("a search ends")


def _closed_up(going: Tensor) -> Tensor:
    """The sources that go on, each in its place but for the last ones, which fill the places of those that do not."""
    left = int(going.sum())
    rows = torch.arange(left, device=going.device)
    rows[(~going[:left]).nonzero().flatten()] = left + going[left:].nonzero().flatten()
    return rows


def _owned(state: State, batch: Batch) -> State:
    """The same state, of whose fixed part nothing lies where the batch does: sources that leave are written over."""
    lent = {part.untyped_storage().data_ptr() for part in tensors_of(batch)}

    def own(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in lent or not x.is_contiguous() else x

    return replace(state, fixed={name: map_tensors(own, tree) for name, tree in state.fixed.items()})


def _banned(rules: Sequence[Rule], said: int | None) -> tuple[int, ...] | None:
    """What no row may say after so many tokens (None: not all have said as many), where rules do no more than that."""
    if said is None and rules:
        return None
    banned = [rule.forbids(said or 0) for rule in (NEVER, *rules)]
    return None if any(one is None for one in banned) else tuple(token for one in banned for token in one or ())


def _pick(strategy: Strategy, live: Live, found: Proposal, enough: int) -> Live:
    """Chooses among what was proposed for each row, and sets aside what ended."""
    shape = (*live.totals.shape, -1)
    choice = strategy.pick(live.totals, found.logs.view(shape), found.tokens.view(shape))
    assert choice.places is not None
    chosen = found.logs.view(len(live.totals), -1).gather(1, choice.places)  # B N
    return _advance(strategy, replace(live, state=found.state), choice, chosen, enough)


def _choose(strategy: Strategy, rules: Sequence[Rule], live: Live, logits: Tensor, enough: int) -> Live:
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
        return _advance(strategy, live, choice, chosen.squeeze(1).gather(1, choice.tokens), enough)
    sources = torch.arange(len(chosen), device=chosen.device)[:, None]
    return _advance(strategy, live, choice, chosen[sources, choice.parents, choice.tokens], enough)


def _advance(strategy: Strategy, live: Live, choice: Choice, chosen: Tensor, enough: int) -> Live:
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


def _extend(live: Live, choice: Choice, chosen: Tensor) -> tuple[Live, Tensor | None]:
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


def _collect(paths: Paths, sources: Tensor, results: list[list[Hypothesis]], best: int | None) -> None:
    """Finished paths, brought to the host in one go, as the hypotheses of their sources."""
    columns = [values[:, :best].tolist() for values in vars(paths).values()]
    for source, *rows in zip(sources.tolist(), *columns, strict=True):
        for ids, scores, rank, length, complete in zip(*rows, strict=True):
            if rank > -torch.inf:
                kept = Hypothesis(tuple(ids[-length:]), tuple(scores[-length:]), rank, complete)
                results[source].append(kept)
