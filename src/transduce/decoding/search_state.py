"""Input of a search, its padding to few shapes, and the beams before the first selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Strategy
from transduce.errors import InputError
from transduce.flow import BOS, PAD, Batch, LexicalConstraints, Padded, State, Step, copied_to
from transduce.kernels.beam_update import BeamState, FinishedHypotheses
from transduce.kernels.host_copies import pins_copies
from transduce.model import Transducer


@dataclass(frozen=True)
class SearchInput:
    """Input of a search."""

    batch: Batch
    max_lengths: Tensor  # B: maximal number of tokens of each source
    prefix: Padded | None  # B P: forced first tokens
    noise: Tensor | None  # B L N: uniform random numbers of a sampling strategy
    max_length: int  # L: the largest of `max_lengths`
    history_columns: int  # columns of the first history: L where shapes are fixed; 0: it grows
    constraints: LexicalConstraints | None = None

    def to(self, device: torch.device) -> SearchInput:
        """On a device; the host does not wait for what a GPU has to do before."""
        pinned = pins_copies(device)
        copy = partial(copied_to, device, pinned=pinned)
        return replace(
            self,
            batch=self.batch.to(device, pinned=pinned),
            max_lengths=copy(self.max_lengths),
            prefix=None if self.prefix is None else self.prefix.to(device, pinned=pinned),
            noise=None if self.noise is None else copy(self.noise),
        )


COLUMN_MULTIPLE = 16  # padding of sources and prefixes in a captured search: few different shapes


@dataclass(frozen=True)
class InputShape:
    """Sizes of a padded search input. Padding changes no result."""

    sources: int
    source_columns: int
    prefix_columns: int


def rounded_shape(given: SearchInput, max_positions: int | None) -> InputShape:
    """The shape with sizes rounded up, so that a captured graph is used again; at most `max_positions` columns."""
    source, prefix = given.batch.source, given.prefix
    return InputShape(
        _round_up(given.batch.size),
        0 if source is None else source.pad_to_multiple(COLUMN_MULTIPLE, max_positions).values.size(1),
        0 if prefix is None else prefix.pad_to_multiple(COLUMN_MULTIPLE, max_positions).values.size(1),
    )


def _round_up(sources: int) -> int:
    multiple = max(1, 2 ** (sources.bit_length() - 3))  # an eighth to a quarter of the sources
    return -(-sources // multiple) * multiple


def padded_input(given: SearchInput, shape: InputShape) -> SearchInput:
    """The input in this shape: the first source repeated, columns padded."""
    size, batch, noise = given.batch.size, given.batch, given.noise
    extra = shape.sources - size
    rows = torch.cat((torch.arange(size), torch.zeros(extra, dtype=torch.long)))
    batch = replace(batch.select(rows), rows=()) if extra else replace(batch, rows=())
    if batch.source is not None:
        batch = replace(batch, source=_pad_columns(batch.source, shape.source_columns))
    rows = rows.to(batch.device)
    prefix = given.prefix
    if prefix is not None:
        prefix = _pad_columns(Padded(prefix.values[rows], prefix.mask[rows]), shape.prefix_columns)
    noise = None if noise is None else noise[rows]
    return replace(given, batch=batch, max_lengths=given.max_lengths[rows], prefix=prefix, noise=noise)


def _pad_columns(rows: Padded, columns: int) -> Padded:
    """Padded to this number of columns; only ids are."""
    more = columns - rows.values.size(1)
    if more <= 0 or rows.ids is None:
        return rows
    return Padded(F.pad(rows.values, (0, more), value=PAD), F.pad(rows.mask, (0, more)))


def initial_beams(model: Transducer, strategy: Strategy, given: SearchInput, capacity: int) -> BeamState:
    """The search before <s>, which its first step reads."""
    none = torch.zeros(given.batch.size, 0, dtype=torch.long, device=given.batch.device)
    empty = Padded(none, none.bool())
    state = model.reserve(model.start(given.batch), 1 + capacity, strategy.width)  # one position is for <s>
    history = _prefix_history(none[..., None].float(), empty, given.history_columns)
    return _beam_state(strategy, given, state, *history, none.sum(1))


def prefill(model: Transducer, strategy: Strategy, given: SearchInput, capacity: int) -> tuple[BeamState, Tensor]:
    """The search after <s> and the forced prefix, and the logits (R V) of its first selection."""
    size, device, width = given.batch.size, given.batch.device, strategy.width
    first = torch.full((size, 1), BOS, device=device)
    tokens, mask = Padded(first, torch.ones_like(first, dtype=torch.bool)), None
    if given.prefix is not None:
        values = torch.cat((first, given.prefix.values), 1)
        tokens = Padded(values, torch.cat((tokens.mask, given.prefix.mask), 1))
        mask = tokens.mask
    covers = strategy.coverage_penalty > 0
    step = model.advance(tokens.values, model.start(given.batch), mask, with_attention=covers)
    prefix_lengths = tokens.mask.sum(1) - 1  # B
    prefix = Padded(tokens.values[:, 1:], tokens.mask[:, 1:])
    columns = tokens.values.size(1) - 1
    if given.history_columns:
        columns = max(given.history_columns, tokens.values.size(1))
    history, token_scores = _prefix_history(step.logits[:, :-1], prefix, columns)
    coverage = _first_coverage(model, step, tokens.mask)[:, None].repeat(1, width, 1) if covers else None
    state = model.reserve(step.state, capacity, width)
    logits = step.logits[torch.arange(size, device=device), prefix_lengths].repeat_interleave(width, 0)
    beams = _beam_state(strategy, given, state, history, token_scores, prefix_lengths)
    return replace(beams, coverage=coverage), logits


def _first_coverage(model: Transducer, step: Step, real: Tensor) -> Tensor:
    """B S: the attention of all real tokens (B T); 1 for padding, which cannot be covered."""
    visible = model.memory_mask(step.state)
    if visible is None:
        raise no_coverage_error()
    return torch.where(visible, (step_attention(step) * real[..., None]).sum(1), 1.0)


def step_attention(step: Step) -> Tensor:
    """R T S: the cross-attention of a step, the mean of all layers and heads."""
    if step.attention is None or step.attention.cross is None:
        raise no_coverage_error()
    return step.attention.cross.float().mean((1, 2))


def no_coverage_error(where: str = "generation") -> InputError:
    """The error of a coverage penalty without cross-attention."""
    return InputError(
        "coverage_penalty needs a decoder that attends to the source, and this one does not",
        where=where,
        remedy="leave it out; or train a decoder with cross-attention, such as transformer, or context: bahdanau",
    )


def _beam_state(
    strategy: Strategy, given: SearchInput, state: State, history: Tensor, token_scores: Tensor, lengths: Tensor
) -> BeamState:
    """A search whose rows all begin with the same tokens (B L) of these lengths (B)."""
    width, device = strategy.width, history.device
    ids = torch.full((len(history), width, history.size(1)), PAD, device=device)
    scores, zeros = torch.zeros_like(ids, dtype=torch.float), torch.zeros(len(history), width, device=device)
    return BeamState(
        state=state.repeat(width),
        history=history[:, None].repeat(1, width, 1),
        token_scores=token_scores[:, None].repeat(1, width, 1),
        totals=strategy.initial_totals(len(history), device),
        lengths=lengths,
        max_lengths=given.max_lengths,
        prefix_lengths=lengths,
        steps=torch.zeros_like(lengths),
        finished=FinishedHypotheses(ids, scores, zeros - torch.inf, zeros.long(), zeros.bool()),
        noise=given.noise,
        max_columns=max(given.max_length, history.size(1) + (0 if given.history_columns else 1)),
        constraints=given.constraints,
    )


def _prefix_history(logits: Tensor, prefix: Padded, columns: int) -> tuple[Tensor, Tensor]:
    """Tokens of a prefix and their log-probabilities under these logits (B P V), both padded on the left: B L."""
    tokens, real = prefix.values, prefix.mask
    scores = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    # Column j of the result is column j - (columns - length) of the prefix, where that exists.
    index = torch.arange(columns, device=tokens.device) - (columns - real.sum(1, keepdim=True))  # B L
    empty = index < 0
    if not tokens.size(1):
        return torch.full_like(index, PAD), torch.zeros_like(index, dtype=torch.float)
    index = index.clamp(min=0)
    return tokens.gather(1, index).masked_fill(empty, PAD), scores.gather(1, index).masked_fill(empty, 0.0)


def uniform_noise(seeds: Sequence[int], steps: int, width: int) -> Tensor:
    """B L N: one generator per source, so that samples do not depend on the batch."""
    return torch.stack([torch.rand(steps, width, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
