"""A model and a quick draft of it in, the model's own greedy hypotheses out, several tokens a step (Leviathan 2023).

The draft proposes some tokens by the one search; the model reads them all in one call, and each that it would have
chosen itself stands. The first that it would not is replaced by its own choice. So the output is that of greedy search,
whatever the draft says: a good one saves calls, a bad one only costs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transduce.contracts import LogitsProcessor
from transduce.decoding.beam_update import NEVER
from transduce.decoding.search import search
from transduce.decoding.strategies import Greedy
from transduce.flow import BOS, EOS, Batch, Hypothesis, Padded, State
from transduce.model import Transducer

WAITING = 16  # tokens that may be read again before the state is brought up to them


@dataclass
class _Row:
    """One source, and what stands so far."""

    longest: int
    ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=lambda: [BOS])  # what the state has not read yet

    @property
    def done(self) -> bool:
        return self.ids[-1:] == [EOS] or len(self.ids) >= self.longest

    def hypothesis(self) -> Hypothesis:
        return Hypothesis(tuple(self.ids), tuple(self.scores), sum(self.scores), self.ids[-1:] == [EOS])


@torch.inference_mode()
def speculate(
    model: Transducer,
    draft: Transducer,
    batch: Batch,
    *,
    longest: Tensor,  # B: most tokens for each source
    rules: Sequence[LogitsProcessor] = (),
    ahead: int = 4,  # tokens that the draft proposes at a time
) -> list[Hypothesis]:
    """What greedy search with the model finds for each source."""
    rows = [_Row(int(most)) for most in longest]
    going, state = list(range(batch.size)), model.start(batch)
    while going:
        live = [rows[number] for number in going]
        proposed = _propose(draft, batch.select(torch.tensor(going)), live, ahead, rules)
        state = _verify(model, state, live, proposed, rules)
        kept = [place for place, row in enumerate(live) if not row.done]
        if len(kept) < len(going):
            going, state = (
                [going[place] for place in kept],
                state.select_sources(torch.tensor(kept, dtype=torch.long, device=batch.device)),
            )
    return [row.hypothesis() for row in rows]


def _propose(
    draft: Transducer, batch: Batch, rows: Sequence[_Row], ahead: int, rules: Sequence[LogitsProcessor]
) -> list[list[int]]:
    """What the draft says after what stands."""
    longest = torch.tensor([min(len(row.ids) + ahead, row.longest) for row in rows])
    begun = Padded.from_rows([row.ids for row in rows]).to(batch.device) if any(row.ids for row in rows) else None
    found = search(draft, batch, Greedy(), longest=longest, rules=rules, prefix=begun)
    return [list(one[0].ids[len(row.ids) :]) for one, row in zip(found, rows, strict=True)]


def _verify(
    model: Transducer,
    state: State,
    rows: Sequence[_Row],
    proposed: Sequence[list[int]],
    rules: Sequence[LogitsProcessor],
) -> State:
    """Reads what waits and what is proposed in one call; rows go on by what the model itself would say."""
    read = Padded.from_rows([row.waiting + ids for row, ids in zip(rows, proposed, strict=True)])
    read = read.to(next(model.parameters()).device)
    step = model.advance(read.values, state, read.mask)
    whole = True
    for number, (row, ids) in enumerate(zip(rows, proposed, strict=True)):
        first, before = len(row.waiting) - 1, len(row.ids)
        _accept(row, step.logits[number, first : first + len(ids) + 1].float(), ids, rules)
        new = row.ids[before:]
        row.waiting += new
        whole = whole and new[: len(ids)] == ids
    if whole:  # all that was read stands
        for row in rows:
            row.waiting = row.ids[-1:]
        return step.state
    if max(len(row.waiting) for row in rows) <= WAITING:
        return state
    return _catch_up(model, state, rows)


def _accept(row: _Row, logits: Tensor, ids: Sequence[int], rules: Sequence[LogitsProcessor]) -> None:
    """The model's own choices, as far as the proposal agrees with them, and one more; logits T V."""
    logs = logits.log_softmax(-1)
    for place in range(len(ids) + 1):
        history = torch.tensor([row.ids], dtype=torch.long, device=logs.device)
        allowed = NEVER.apply(logs[place : place + 1].clone(), history)
        for rule in rules:
            allowed = rule.apply(allowed, history)
        token = int(allowed.argmax(-1))
        row.ids.append(token)
        row.scores.append(float(logs[place, token]))
        if row.done or place == len(ids) or token != ids[place]:
            return


def _catch_up(model: Transducer, state: State, rows: Sequence[_Row]) -> State:
    """The state after all that waits but the newest token of each row."""
    read = Padded.from_rows([row.waiting[:-1] for row in rows]).to(next(model.parameters()).device)
    state = model.advance(read.values, state, read.mask).state
    for row in rows:
        row.waiting = row.waiting[-1:]
    return state
