"""A batch of sources and what was asked in, a search before its first step out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Strategy
from transduce.decoding.paths import Given, Live, Paths
from transduce.flow import BOS, PAD, Padded, State
from transduce.model import Transducer

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
        0 if source is None else source.rounded(COLUMNS, end).values.size(1),
        0 if prefix is None else prefix.rounded(COLUMNS, end).values.size(1),
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
