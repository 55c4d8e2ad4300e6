"""Batches by position enter; the work of one update after the other leaves, shaped and on its device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Generic, Protocol, Self, TypeVar

from transduce.attention.positions import places
from transduce.data.batching import DataPosition
from transduce.flow import Batch
from transduce.kernels.training_graph import rounded
from transduce.training.micro_batch import Piece, Work, pieces_of
from transduce.training.update import Update


class Batches(Protocol):
    """Batches by position: a pure function, so resuming is seeking."""

    def at(self, position: DataPosition) -> Batch: ...

    def after(self, position: DataPosition) -> DataPosition: ...


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
    following: DataPosition
    tokens: int
    slots: int


def fetch(batches: Batches, position: DataPosition, update: Update) -> Iterator[Fetched]:
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
    if not update.records or batch.packed_labels is not None:
        return batch
    budget = update.settings.budget // (update.processes.size * update.settings.accumulate)
    return rounded(batch, budget, places(update.model))


Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """A few items ahead. What the items are made from must not read the global random generators: the training
    thread seeds those, and the two would race."""

    def __init__(self, items: Iterator[Item], ahead: int = 2) -> None:
        self._items = items
        self._ready: Queue[Item | BaseException] = Queue(ahead)
        self._closed = Event()
        self._thread = Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except Full:
                continue
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        while True:  # room for a thread that is waiting to put
            try:
                self._ready.get_nowait()
            except Empty:
                break
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
