"""A model and a batch of sources in, the best hypotheses of each source out: the only token loop.

Every tensor of the search keeps its shape from step to step and nothing in a step waits for the host, so a step is one
function of fixed buffers: it runs as it is, or replayed as a recorded graph (see graphs.py). Histories are padded on
the left: the newest token is always the last column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.attention.positions import places
from transduce.contracts import Choice, Rule, Strategy
from transduce.decoding.graphs import Graphs
from transduce.decoding.rules import Ban
from transduce.flow import BOS, EOS, PAD, Batch, Hypothesis, Padded, State
from transduce.model import Transducer

NEVER = Ban([PAD, BOS])  # no strategy may choose these
LEAVE = 0.75  # on a GPU sources leave together, once no more than this share of them goes on: leaving copies the rest
ROOM = 32  # tokens that a search asks room for at first; it doubles
COLUMNS = 16  # of a source in a recorded search: a multiple of so many
COMPLETE = 1e9  # of a whole hypothesis over one that was cut, whatever their ranks


@dataclass(frozen=True)
class Given:
    """What a search begins with."""

    batch: Batch
    longest: Tensor  # B: most tokens
    prefix: Padded | None  # B P: tokens that every hypothesis begins with
    noise: Tensor | None  # B L N


@dataclass(frozen=True)
class Paths:
    """Rows of tokens with what the search knows of each: B N of them."""

    ids: Tensor  # B N L, padded on the left
    scores: Tensor  # B N L: the model's own log-probabilities, untouched by rules
    ranks: Tensor  # B N: -inf where there is no path
    lengths: Tensor  # B N
    complete: Tensor  # B N: ended with </s>, not cut

    def best(self, most: int, whole_first: bool) -> Paths:
        """The `most` best by their rank; whole ones before those that were cut where that is asked for."""
        ranks = self.ranks.double() + COMPLETE * self.complete if whole_first else self.ranks
        order = ranks.topk(most, 1).indices  # B N

        def pick(values: Tensor) -> Tensor:
            index = order if values.dim() == 2 else order[..., None].expand(-1, -1, values.size(2))
            return values.gather(1, index)

        return Paths(*(pick(values) for values in vars(self).values()))

    def join(self, other: Paths) -> Paths:
        return Paths(*(torch.cat(pair, 1) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def keep(self, rows: Tensor) -> Paths:
        return Paths(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True)
class Live:
    """A search between two steps. Axis 0 is the sources that are left, axis 1 their beams."""

    state: State  # all but the newest token read
    history: Tensor  # B N L
    scores: Tensor  # B N L
    totals: Tensor  # B N: what the search adds up, -inf for a dead row
    lengths: Tensor  # B: tokens so far, a forced prefix included
    longest: Tensor  # B: most tokens
    begun: Tensor  # B: tokens that were given, which no rank counts
    drawn: Tensor  # B: steps so far
    finished: Paths
    noise: Tensor | None  # B L N

    def keep(self, rows: Tensor, *, owned: bool = False) -> Live:
        names = ("history", "scores", "totals", "lengths", "longest", "begun", "drawn")
        return Live(
            state=self.state.keep(rows, owned=owned),
            finished=self.finished.keep(rows),
            noise=None if self.noise is None else self.noise[rows],
            **{name: getattr(self, name)[rows] for name in names},
        )

    @property
    def going(self) -> Tensor:
        """B: which sources have a row that goes on."""
        return (self.totals > -torch.inf).any(1)


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
    noise = _draw(seeds or range(batch.size), most, strategy.width).to(batch.device) if strategy.random else None
    given = Given(batch, longest.to(batch.device), prefix, noise)
    results: list[list[Hypothesis]] = [[] for _ in range(batch.size)]
    sources = torch.arange(batch.size)
    # A recorded step needs all its room at once; elsewhere room that may never be used would only be read in vain.
    room = min(most, ROOM)
    if graphs is not None:  # few different shapes, so that a recording is used again
        most = room = -(-most // ROOM) * ROOM
        given = _rounded(given, most, places(model))

    def begin(asked: Given) -> Live:
        return _choose(strategy, rules, *_begin(model, strategy, asked, most, room))

    def step(now: Live) -> Live:
        read = model.advance(now.history[..., -1].reshape(-1, 1), now.state)
        return _choose(strategy, rules, replace(now, state=read.state), read.logits[:, -1])

    if graphs is not None:
        last = graphs.run(begin, step, given, key=(strategy, tuple(rules), most), steady=model.steady)
        _collect(last.finished.keep(sources), sources, results, best)
        return results
    live, owned = begin(given), False
    for taken in count(1):
        going = live.going
        left, size = int(going.sum()), len(going)
        # On a CPU a row that is done costs as much as one that goes on, and only what fills its place is copied.
        if left < size if going.is_cpu else left <= LEAVE * size:
            done, rows = (~going).nonzero().flatten(), _closed_up(going)
            _collect(live.finished.keep(done), sources[done.cpu()], results, best)
            live, sources, owned = live.keep(rows, owned=owned), sources[rows.cpu()], True
            if not len(sources):
                return results
        if taken == room:
            live = replace(live, state=model.reserve(live.state, room, strategy.width))
            room *= 2
        live = step(live)
    raise AssertionError("a search ends")


def _closed_up(going: Tensor) -> Tensor:
    """The sources that go on, each in its place but for the last ones, which fill the places of those that do not."""
    left = int(going.sum())
    rows = torch.arange(left, device=going.device)
    rows[(~going[:left]).nonzero().flatten()] = left + going[left:].nonzero().flatten()
    return rows


def _rounded(given: Given, most: int, end: int | None) -> Given:
    """The same with a round number of sources, the last ones idle, and of source columns, the last ones padding."""
    size, batch = given.batch.size, given.batch
    grain = max(1, 2 ** (size.bit_length() - 3))  # an eighth to a quarter of them
    extra = -size % grain
    rows = torch.cat((torch.arange(size), torch.zeros(extra, dtype=torch.long)))
    batch = replace(batch.select(rows), rows=())
    if batch.source is not None:
        batch = replace(batch, source=batch.source.rounded(COLUMNS, end))
    longest = F.pad(given.longest, (0, extra), value=1)
    rows = rows.to(batch.device)
    prefix = given.prefix
    if prefix is not None:
        prefix = Padded(prefix.values[rows], prefix.mask[rows]).rounded(COLUMNS, end)
    noise = given.noise
    if noise is not None:
        noise = F.pad(noise, (0, 0, 0, most - noise.size(1)))[rows]
    return Given(batch, longest, prefix, noise)


def _choose(strategy: Strategy, rules: Sequence[Rule], live: Live, logits: Tensor) -> Live:
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
    live, rows = _extend(live, choice, logs)
    live = _set_aside(live, strategy)
    if rows is not None and live.totals.size(1) > strategy.width:
        live, rows = _narrowed(live, rows, strategy.width)
    live = _settle(live, strategy)
    return live if rows is None else replace(live, state=live.state.reorder(rows))


def _extend(live: Live, choice: Choice, logs: Tensor) -> tuple[Live, Tensor | None]:
    """Appends the chosen tokens; gives the rows to reorder the state by, None where the order stays."""
    sources, beams = choice.parents.shape
    history, scores, rows = live.history, live.scores, None
    if beams == 1:
        chosen = logs.gather(1, choice.tokens)[:, None]  # B 1 1
    else:
        offsets = torch.arange(sources, device=choice.parents.device)[:, None] * live.totals.size(1)
        rows = (choice.parents + offsets).flatten()  # R
        chosen = logs[rows, choice.tokens.flatten()].view(sources, beams, 1)
        index = choice.parents[..., None].expand(-1, -1, history.size(-1))
        history, scores = history.gather(1, index), scores.gather(1, index)
    extended = replace(
        live,
        history=torch.cat((history[..., 1:], choice.tokens[..., None]), -1),
        scores=torch.cat((scores[..., 1:], chosen), -1),
        totals=choice.totals,
        lengths=live.lengths + 1,
        drawn=(live.drawn + 1).clamp(max=history.size(-1) - 1),  # a recorded search steps on after its end
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


def _settle(live: Live, strategy: Strategy) -> Live:
    """A source is done when no row lives, or none could still enter the best N."""
    finished = live.finished
    if finished.complete.is_cpu and not finished.complete.all(1).any():
        return live
    floor = finished.ranks.masked_fill(~finished.complete, -torch.inf).amin(1)  # B: the rank a newcomer must beat
    horizon = strategy.horizon(live.lengths - live.begun, live.longest - live.begun)
    best = strategy.bound(live.totals, horizon).amax(1)
    return replace(live, totals=live.totals.masked_fill((best <= floor)[:, None], -torch.inf))


def _begin(model: Transducer, strategy: Strategy, given: Given, most: int, room: int) -> tuple[Live, Tensor]:
    """The search before its first choice, and the scores (R V) to choose by."""
    size, device, width = given.batch.size, given.batch.device, strategy.width
    first = torch.full((size, 1), BOS, device=device)
    begin, mask = Padded(first, torch.ones_like(first, dtype=torch.bool)), None
    if given.prefix is not None:
        values = torch.cat((first, given.prefix.values), 1)
        begin = Padded(values, torch.cat((begin.mask, given.prefix.mask), 1))
        mask = begin.mask
    step = model.advance(begin.values, model.start(given.batch), mask)
    last = begin.mask.sum(1) - 1  # B
    history, scores = _forced(step.logits, begin, max(most, begin.values.size(1)))
    none = torch.full((size, width, history.size(1)), PAD, device=device)
    empty = torch.zeros(size, width, device=device)
    live = Live(
        state=model.reserve(step.state, room, width).repeat(width),
        history=history[:, None].repeat(1, width, 1),
        scores=scores[:, None].repeat(1, width, 1),
        totals=strategy.begin(size, device),
        lengths=last,
        longest=given.longest,
        begun=last,
        drawn=torch.zeros_like(last),
        finished=Paths(none, torch.zeros_like(none, dtype=torch.float), empty - torch.inf, empty.long(), empty.bool()),
        noise=given.noise,
    )
    return live, step.logits[torch.arange(size, device=device), last].repeat_interleave(width, 0)


def _forced(logits: Tensor, begin: Padded, room: int) -> tuple[Tensor, Tensor]:
    """The prefix without <s> and the log-probabilities of its tokens, both padded on the left: B L."""
    tokens, real = begin.values[:, 1:], begin.mask[:, 1:]
    scores = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    # Column j of the result is column j - (room - length) of the prefix, where that exists.
    index = torch.arange(room, device=tokens.device) - (room - real.sum(1, keepdim=True))  # B L
    empty = index < 0
    if not tokens.size(1):
        return torch.full_like(index, PAD), torch.zeros_like(index, dtype=torch.float)
    index = index.clamp(min=0)
    return tokens.gather(1, index).masked_fill(empty, PAD), scores.gather(1, index).masked_fill(empty, 0.0)


def _draw(seeds: Sequence[int], steps: int, width: int) -> Tensor:
    """Each source has a generator of its own, so that its neighbours in the batch cannot change its samples."""
    return torch.stack(
        [torch.rand(steps, width, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )  # B L N


def _collect(paths: Paths, sources: Tensor, results: list[list[Hypothesis]], best: int | None) -> None:
    """Finished paths, brought to the host in one go, as the hypotheses of their sources."""
    columns = [values[:, :best].tolist() for values in vars(paths).values()]
    for source, *rows in zip(sources.tolist(), *columns, strict=True):
        for ids, scores, rank, length, complete in zip(*rows, strict=True):
            if rank > -torch.inf:
                kept = Hypothesis(tuple(ids[-length:]), tuple(scores[-length:]), rank, complete)
                results[source].append(kept)
