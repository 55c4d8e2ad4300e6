"""Tokens so far and what a search knows of them: the values that go from one step of it to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Strategy
from transduce.flow import BOS, PAD, Batch, Padded, State, Tree
from transduce.model import Transducer

ROWS = ("history", "scores", "totals", "lengths", "longest", "begun", "drawn")  # one row a source each
COMPLETE = 1e9  # of a whole hypothesis over one that was cut, whatever their ranks


class UnlikeError(Exception):
    """Sources that cannot go on beside others."""


@dataclass(frozen=True)
class Given:
    """What a search begins with."""

    batch: Batch
    longest: Tensor  # B: most tokens
    prefix: Padded | None  # B P: tokens that every hypothesis begins with
    noise: Tensor | None  # B L N
    most: int  # L: the greatest of `longest`
    wide: int  # columns of the first histories: L where shapes must stay, else 0, and they grow

    def to(self, device: torch.device) -> Given:
        """The same there."""
        prefix = None if self.prefix is None else self.prefix.to(device)
        noise = None if self.noise is None else self.noise.to(device)
        return replace(self, batch=self.batch.to(device), longest=self.longest.to(device), prefix=prefix, noise=noise)


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
        pairs = zip(vars(self.widened(other.ids.size(2))).values(), vars(other).values(), strict=True)
        return Paths(*(torch.cat(pair, 1) for pair in pairs))

    def widened(self, columns: int) -> Paths:
        """With as many columns at least: others are longer by now."""
        more = columns - self.ids.size(2)
        if more <= 0:
            return self
        return replace(self, ids=F.pad(self.ids, (more, 0)), scores=F.pad(self.scores, (more, 0)))

    def put(self, places: Tensor, other: Paths) -> Paths:
        """The rows in these places written over by the first ones of others."""
        columns = max(self.ids.size(2), other.ids.size(2))
        pairs = zip(vars(self.widened(columns)).values(), vars(other.widened(columns)).values(), strict=True)
        return Paths(*(old.index_copy_(0, places, new[: len(places)]) for old, new in pairs))

    def keep(self, rows: Tensor, most: int | None = None) -> Paths:
        """Those of these sources, the first `most` of each."""
        return Paths(*(values[:, :most][rows] for values in vars(self).values()))


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
    most: int = 0  # L: columns that histories come to have; 0: they have all

    def keep(self, rows: Tensor, *, owned: bool = True) -> Live:
        """Only these sources. `owned`: nobody else reads the state, see `State.keep`."""
        return Live(
            state=self.state.select_sources(rows, owned=owned),
            finished=self.finished.keep(rows),
            noise=None if self.noise is None else self.noise[rows],
            most=self.most,
            **{name: getattr(self, name)[rows] for name in ROWS},
        )

    def idle(self, places: int) -> Live:
        """So many places for sources like these, in which none is searched yet: see `put`."""
        rows = torch.arange(places, device=self.totals.device) % len(self.totals)  # real numbers, nowhere a nan
        empty = self.keep(rows, owned=False)
        return replace(empty, totals=torch.full_like(empty.totals, -torch.inf))

    def put(self, places: Tensor, other: Live) -> Live:
        """The sources in these places replaced by the first ones of another search; all is written over.

        An UnlikeError where what is known of them has another form: then nothing is.
        """
        if _form(vars(self.state)) != _form(vars(other.state)):
            raise UnlikeError

        def write(old: Tensor, new: Tensor) -> Tensor:
            if new.dim() == 3:  # as wide as this search is by now
                new = F.pad(new, (old.size(2) - new.size(2), 0))
            return old.index_copy_(0, places, new[: len(places)])

        return Live(
            state=self.state.replace_sources(places, other.state, owned=True),
            finished=self.finished.put(places, other.finished),
            noise=None if self.noise is None or other.noise is None else write(self.noise, other.noise),
            most=self.most,
            **{name: write(getattr(self, name), getattr(other, name)) for name in ROWS},
        )

    @property
    def going(self) -> Tensor:
        """B: which sources have a row that goes on."""
        return (self.totals > -torch.inf).any(1)


def _form(tree: Tree) -> Any:
    """Names and shapes of tensors but for their first axis."""
    if isinstance(tree, dict):
        return {name: _form(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(_form, tree))
    return tree.shape[1:] if isinstance(tree, Tensor) else tree


COLUMNS = 16  # of a source in a recorded search: a multiple of so many


@dataclass(frozen=True)
class Shape:
    """How large what a search begins with is: nothing depends on what fills it up."""

    sources: int
    columns: int  # of the source
    prefix: int  # columns of the prefix


def round_shape(given: Given, end: int | None) -> Shape:
    """A round number of sources and columns, so that a recording is used again; `end`: where a model's places end."""
    source, prefix = given.batch.source, given.prefix
    return Shape(
        round_up(given.batch.size),
        0 if source is None else source.pad_to_multiple(COLUMNS, end).values.size(1),
        0 if prefix is None else prefix.pad_to_multiple(COLUMNS, end).values.size(1),
    )


def round_up(sources: int) -> int:
    grain = max(1, 2 ** (sources.bit_length() - 3))  # an eighth to a quarter of them
    return -(-sources // grain) * grain


def filled(given: Given, shape: Shape) -> Given:
    """The same in this shape: the last sources are the first one again, the last columns padding."""
    size, batch, noise = given.batch.size, given.batch, given.noise
    extra = shape.sources - size
    rows = torch.cat((torch.arange(size), torch.zeros(extra, dtype=torch.long)))
    batch = replace(batch.select(rows), rows=()) if extra else replace(batch, rows=())
    if batch.source is not None:
        batch = replace(batch, source=_widened(batch.source, shape.columns))
    rows = rows.to(batch.device)
    prefix = given.prefix
    if prefix is not None:
        prefix = _widened(Padded(prefix.values[rows], prefix.mask[rows]), shape.prefix)
    noise = None if noise is None else noise[rows]
    return replace(given, batch=batch, longest=given.longest[rows], prefix=prefix, noise=noise)


def _widened(rows: Padded, columns: int) -> Padded:
    """Padding up to so many columns; only of ids."""
    more = columns - rows.values.size(1)
    if more <= 0 or rows.ids is None:
        return rows
    return Padded(F.pad(rows.values, (0, more), value=PAD), F.pad(rows.mask, (0, more)))


def bare_search(model: Transducer, strategy: Strategy, given: Given, room: int) -> Live:
    """The search before <s> was read, by as many rows as it will have."""
    none = torch.zeros(given.batch.size, 0, dtype=torch.long, device=given.batch.device)
    begin = Padded(none, none.bool())
    state = model.reserve(model.start(given.batch), 1 + room, strategy.width)  # <s> takes a place
    return _live(strategy, given, state, *_forced(none[..., None].float(), begin, given.wide), none.sum(1))


def first_scores(model: Transducer, strategy: Strategy, given: Given, room: int) -> tuple[Live, Tensor]:
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
    given_tokens = Padded(begin.values[:, 1:], begin.mask[:, 1:])
    columns = max(given.wide, begin.values.size(1)) if given.wide else begin.values.size(1) - 1
    history, scores = _forced(step.logits[:, :-1], given_tokens, columns)
    state = model.reserve(step.state, room, width)
    logits = step.logits[torch.arange(size, device=device), last].repeat_interleave(width, 0)
    return _live(strategy, given, state, history, scores, last), logits


def _live(strategy: Strategy, given: Given, state: State, history: Tensor, scores: Tensor, begun: Tensor) -> Live:
    """A search whose rows all begin with the same tokens (B L), of which so many are real."""
    width, device = strategy.width, history.device
    none = torch.full((len(history), width, history.size(1)), PAD, device=device)
    empty = torch.zeros(len(history), width, device=device)
    return Live(
        state=state.repeat(width),
        history=history[:, None].repeat(1, width, 1),
        scores=scores[:, None].repeat(1, width, 1),
        totals=strategy.begin(len(history), device),
        lengths=begun,
        longest=given.longest,
        begun=begun,
        drawn=torch.zeros_like(begun),
        finished=Paths(none, torch.zeros_like(none, dtype=torch.float), empty - torch.inf, empty.long(), empty.bool()),
        noise=given.noise,
        most=max(given.most, history.size(1) + (0 if given.wide else 1)),
    )


def _forced(logits: Tensor, begun: Padded, room: int) -> tuple[Tensor, Tensor]:
    """The tokens of a prefix and their log-probabilities by these logits (B P V), both padded on the left: B L."""
    tokens, real = begun.values, begun.mask
    scores = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    # Column j of the result is column j - (room - length) of the prefix, where that exists.
    index = torch.arange(room, device=tokens.device) - (room - real.sum(1, keepdim=True))  # B L
    empty = index < 0
    if not tokens.size(1):
        return torch.full_like(index, PAD), torch.zeros_like(index, dtype=torch.float)
    index = index.clamp(min=0)
    return tokens.gather(1, index).masked_fill(empty, PAD), scores.gather(1, index).masked_fill(empty, 0.0)


def draw(seeds: Sequence[int], steps: int, width: int) -> Tensor:
    """Each source has a generator of its own, so that its neighbours in the batch cannot change its samples."""
    return torch.stack(
        [torch.rand(steps, width, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )  # B L N
