"""Batch feeding: micro-batches of each update, prefetched to the device by a thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Generic, Protocol, Self, TypeVar

import torch

from transduce.attention.positions import max_positions
from transduce.data.batching import DataPosition
from transduce.flow import Batch
from transduce.kernels.cuda_graph import pad_to_bucket
from transduce.training.update import MicroBatch, Update, UpdateBatch, split_batch


class BatchSource(Protocol):
    """Batches by position: a pure function of the position, so a resumed run continues at any position."""

    def at(self, position: DataPosition) -> Batch: ...

    def after(self, position: DataPosition) -> DataPosition: ...


def fingerprint(batch: Batch) -> str:
    """A hash of the content. That of the first batch of a run tells whether the data has changed."""
    digest = hashlib.sha256(repr(batch.rows).encode())
    for part in (batch.source, batch.target, *batch.extra.values()):
        if part is not None:
            digest.update(part.values.numpy().tobytes() + part.mask.numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class FetchedBatch:
    """The batch of one update on its device, with its position in the data."""

    update_batch: UpdateBatch
    epoch: int
    next_position: DataPosition
    tokens: int
    slots: int  # tokens and padding


class DeviceCopy:
    """Copies batches to a device.

    To a GPU it copies from page-locked memory on a stream of its own. A copy from other memory would wait until the
    GPU has computed all updates that are queued, and the next batch would not be ready in time. The trainer keeps a
    batch until its update is done, so its memory is not reused too early.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        if self.stream is None:
            return batch.to(self.device)
        with torch.cuda.stream(self.stream):
            copied = batch.to(self.device, pinned=True)
        self.stream.synchronize()
        return copied


def fetch(batches: BatchSource, position: DataPosition, update: Update) -> Iterator[FetchedBatch]:
    """The batches of all updates from `position` on. Runs in the prefetching thread, in parallel with training."""
    copy = DeviceCopy(update.device)
    while True:
        batch = batches.at(position)
        micro_batches = [
            MicroBatch(one.first_row, copy(_pad_for_cuda_graphs(one.batch, update)))
            for one in split_batch(batch, update.processes, update.settings.accumulate)
        ]
        epoch, position = position.epoch, batches.after(position)
        content = UpdateBatch(micro_batches, update.objective.count(batch))
        yield FetchedBatch(content, epoch, position, batch.tokens, batch.slots)


def _pad_for_cuda_graphs(batch: Batch, update: Update) -> Batch:
    """Pads a micro-batch to one of few shapes. A packed batch always has the same shape."""
    if not update.uses_cuda_graphs or batch.packed_labels is not None:
        return batch
    budget = update.settings.budget // (update.processes.size * update.settings.accumulate)
    return pad_to_bucket(batch, budget, max_positions(update.model))


Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates in a background thread, `ahead` items in advance.

    The iterator must not use the global random generators: the training thread seeds them, and the two would race.
    """

    def __init__(self, items: Iterator[Item], ahead: int = 2) -> None:
        self._items = items
        self._ready: Queue[Item | BaseException] = Queue(ahead)
        self._closed = Event()
        self._thread = Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
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
        while True:  # empties the queue, so that a blocked put returns
            try:
                self._ready.get_nowait()
            except Empty:
                break
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
