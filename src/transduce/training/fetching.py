"""Batches by position enter; the work of one update after the other leaves, shaped and on its device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from transduce.attention.positions import places
from transduce.data.batching import Position
from transduce.flow import Batch
from transduce.training.recorded import rounded
from transduce.training.update import Update
from transduce.training.work import Piece, Work, pieces_of


class Batches(Protocol):
    """Batches by position: a pure function, so resuming is seeking."""

    def at(self, position: Position) -> Batch: ...

    def after(self, position: Position) -> Position: ...


def fingerprint(batch: Batch) -> str:
    """Names a batch by its content: the first one of a run tells whether the data is still the same."""
    digest = hashlib.sha256(repr(batch.rows).encode())
    for part in (batch.source, batch.target, *batch.extra.values()):
        if part is not None:
            digest.update(part.values.numpy().tobytes() + part.mask.numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Fetched:
    """One batch, ready for its update."""

    work: Work
    epoch: int
    following: Position
    tokens: int
    slots: int


def fetch(batches: Batches, position: Position, update: Update) -> Iterator[Fetched]:
    """Runs in the prefetching thread, so copies to the device go on beside the computation."""
    while True:
        batch = batches.at(position)
        pieces = [
            Piece(piece.first, _shaped(piece.batch, update).to(update.device))
            for piece in pieces_of(batch, update.processes, update.settings.accumulate)
        ]
        epoch, position = position.epoch, batches.after(position)
        yield Fetched(Work(pieces, update.objective.count(batch)), epoch, position, batch.tokens, batch.slots)


def _shaped(batch: Batch, update: Update) -> Batch:
    """A piece with few different shapes, where passes are recorded. A packed batch has always the same."""
    if not update.records or batch.said is not None:
        return batch
    budget = update.settings.budget // (update.processes.size * update.settings.accumulate)
    return rounded(batch, budget, places(update.model))
