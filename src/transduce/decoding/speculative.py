"""Speculative decoding: greedy search with a fast draft model (Leviathan 2023).

The draft generates a few tokens by the ordinary search; the model reads them all in one call, and accepts each that it
would have selected itself. The first other one is replaced by its own token. So the output is that of greedy search,
whatever the draft: a good draft saves calls, a bad one only costs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transduce.contracts import LogitsProcessor
from transduce.decoding.logits_processors import NEVER_GENERATED
from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy
from transduce.flow import BOS, EOS, Batch, Hypothesis, Padded, State
from transduce.model import Transducer

MAX_PENDING = 16  # tokens that may be read again before the state is brought up to date


@dataclass
class _Row:
    """One source with its accepted tokens."""

    max_length: int
    ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=lambda: [BOS])  # tokens that the state has not read yet

    @property
    def done(self) -> bool:
        return self.ids[-1:] == [EOS] or len(self.ids) >= self.max_length

    def hypothesis(self) -> Hypothesis:
        return Hypothesis(tuple(self.ids), tuple(self.scores), sum(self.scores), self.ids[-1:] == [EOS])


@torch.inference_mode()
def speculative_search(
    model: Transducer,
    draft: Transducer,
    batch: Batch,
    *,
    max_lengths: Tensor,  # B: maximal number of tokens of each source
    processors: Sequence[LogitsProcessor] = (),
    draft_tokens: int = 4,  # tokens that the draft generates at a time
) -> list[Hypothesis]:
    """The greedy hypothesis of the model for each source."""
    rows = [_Row(int(length)) for length in max_lengths]
    active, state = list(range(batch.size)), model.start(batch)
    while active:
        current = [rows[number] for number in active]
        drafted = _draft(draft, batch.select(torch.tensor(active)), current, draft_tokens, processors)
        state = _verify(model, state, current, drafted, processors)
        unfinished = [index for index, row in enumerate(current) if not row.done]
        if len(unfinished) < len(active):
            active = [active[index] for index in unfinished]
            state = state.select_sources(torch.tensor(unfinished, dtype=torch.long, device=batch.device))
    return [row.hypothesis() for row in rows]


def _draft(
    draft: Transducer, batch: Batch, rows: Sequence[_Row], draft_tokens: int, processors: Sequence[LogitsProcessor]
) -> list[list[int]]:
    """The next tokens of the draft after the accepted ones."""
    max_lengths = torch.tensor([min(len(row.ids) + draft_tokens, row.max_length) for row in rows])
    prefix = Padded.from_rows([row.ids for row in rows]).to(batch.device) if any(row.ids for row in rows) else None
    found = search(draft, batch, Greedy(), max_lengths=max_lengths, processors=processors, prefix=prefix)
    return [list(one[0].ids[len(row.ids) :]) for one, row in zip(found, rows, strict=True)]


def _verify(
    model: Transducer,
    state: State,
    rows: Sequence[_Row],
    drafted: Sequence[list[int]],
    processors: Sequence[LogitsProcessor],
) -> State:
    """Reads pending and drafted tokens in one call, and extends each row by the tokens that the model selects."""
    tokens = Padded.from_rows([row.pending + ids for row, ids in zip(rows, drafted, strict=True)])
    tokens = tokens.to(next(model.parameters()).device)
    step = model.advance(tokens.values, state, tokens.mask)
    all_accepted = True
    for number, (row, ids) in enumerate(zip(rows, drafted, strict=True)):
        first, before = len(row.pending) - 1, len(row.ids)
        _accept(row, step.logits[number, first : first + len(ids) + 1].float(), ids, processors)
        new = row.ids[before:]
        row.pending += new
        all_accepted = all_accepted and new[: len(ids)] == ids
    if all_accepted:  # the state has read accepted tokens only
        for row in rows:
            row.pending = row.ids[-1:]
        return step.state
    if max(len(row.pending) for row in rows) <= MAX_PENDING:
        return state
    return _catch_up(model, state, rows)


def _accept(row: _Row, logits: Tensor, ids: Sequence[int], processors: Sequence[LogitsProcessor]) -> None:
    """Appends the tokens of the model as far as the draft agrees with them, and one more; logits T V."""
    log_probs = logits.log_softmax(-1)
    for step in range(len(ids) + 1):
        history = torch.tensor([row.ids], dtype=torch.long, device=log_probs.device)
        allowed = NEVER_GENERATED.apply(log_probs[step : step + 1].clone(), history)
        for processor in processors:
            allowed = processor.apply(allowed, history)
        token = int(allowed.argmax(-1))
        row.ids.append(token)
        row.scores.append(float(log_probs[step, token]))
        if row.done or step == len(ids) or token != ids[step]:
            return


def _catch_up(model: Transducer, state: State, rows: Sequence[_Row]) -> State:
    """The state after all pending tokens but the newest of each row."""
    tokens = Padded.from_rows([row.pending[:-1] for row in rows]).to(next(model.parameters()).device)
    state = model.advance(tokens.values, state, tokens.mask).state
    for row in rows:
        row.pending = row.pending[-1:]
    return state
