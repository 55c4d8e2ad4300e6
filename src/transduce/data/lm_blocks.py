"""A store of running text enters, batches of its passages leave for any `DataPosition`: resume seeks, as with pairs.

A file is one stream of ids, <s> first and </s> last. A passage of N tokens is a row of N + 1 ids: every one but the
first is foretold, and the last one begins the next passage, so each token is foretold exactly once in an epoch. The
places of the cuts are drawn anew for every epoch, and the passages come in random order. The first and the last
passage of a file are as short as the cuts leave them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from transduce.data.batching import DataPosition
from transduce.data.epoch_plan import RowSubset, repeat_counts
from transduce.data.rng import SeededRandom
from transduce.data.store import Store
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded


@dataclass(frozen=True)
class TokenStream:
    """Blocks of one file that follow one another, as ids between <s> and </s>; nothing is read before it is asked for.

    `closed` is False where the text goes on in blocks that are held out: then no </s> is foretold.
    """

    content: np.ndarray  # memory mapped
    corpus: int
    closed: bool = True

    def __len__(self) -> int:
        return 1 + len(self.content) + self.closed

    def ids(self, begin: int, end: int) -> np.ndarray:
        """The ids from place `begin` up to `end`, <s> being at place 0."""
        inner = self.content[max(begin - 1, 0) : max(end - 1, 0)].astype(np.int64)
        first = [BOS] if begin == 0 < end else []
        last = [EOS] if self.closed and begin < len(self) == end else []
        return np.concatenate([np.array(part, np.int64) for part in (first, inner, last)])


def token_streams(store: Store, rows: RowSubset | np.ndarray) -> list[TokenStream]:
    """These blocks of a store as streams, one a file; rows of one file follow one another."""
    rows = np.asarray(rows)
    corpus_of = store.corpus_of[rows]
    edges = [0, *(np.flatnonzero(np.diff(corpus_of)) + 1).tolist(), len(rows)]
    result = []
    for begin, end in pairwise(edges):
        corpus, last = int(corpus_of[begin]), int(rows[end - 1]) + 1
        goes_on = last < len(store) and int(store.corpus_of[last]) == corpus
        result.append(TokenStream(store.stretch("target", int(rows[begin]), last), corpus, closed=not goes_on))
    return result


def hold_out_end(store: Store, tokens: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(train, development) blocks: the end of every file is held out, so many tokens in all, in whole blocks."""
    lengths = store.lengths[:, 1].astype(np.int64)
    total = int(lengths.sum())
    share = (min(total / 10, 100_000) if tokens is None else tokens) / max(total, 1)
    held = np.zeros(len(store), bool)
    for corpus in np.unique(store.corpus_of):
        blocks = np.flatnonzero(store.corpus_of == corpus)
        after = np.cumsum(lengths[blocks][::-1])  # tokens from the end of the file
        count = int(np.searchsorted(after, share * after[-1], "right"))
        count = max(count, 1) if len(blocks) > 1 else 0
        held[blocks[len(blocks) - count :]] = True
    if not held.any() or held.all():
        raise InputError(
            f"cannot hold out the end of a text of {total:,} tokens",
            remedy="give more text, another data.dev_size, or a file of held-out text: data.dev",
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


@dataclass(frozen=True)
class _BlockSpans:
    """The passages of one epoch, in the order they are read in."""

    stream: np.ndarray
    begin: np.ndarray  # place of the first id of each
    end: np.ndarray  # place after its last id

    def part(self, rows: np.ndarray | slice) -> _BlockSpans:
        return _BlockSpans(self.stream[rows], self.begin[rows], self.end[rows])


def block_spans(texts: Sequence[TokenStream], size: int, offsets: Sequence[int]) -> _BlockSpans:
    """All passages, file after file: the first of each has `offset` tokens (0: `size`), all others `size`."""
    parts = []
    for number, (text, offset) in enumerate(zip(texts, offsets, strict=True)):
        last = len(text) - 1  # the place of the last id: none is foretold after it
        begins = np.arange(offset - size if offset and last else 0, last, size).clip(min=0)
        ends = np.append(begins[1:], last)[: len(begins)] + 1
        parts.append((np.full(len(begins), number), begins, ends))
    return _BlockSpans(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class BlockBatches:
    """Endless batches of passages, epoch after epoch: as many in a batch as make `batch_tokens` foretold tokens."""

    def __init__(
        self,
        texts: Sequence[TokenStream],
        size: int,
        *,
        batch_tokens: int,
        seed: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        if sum(len(text) - 1 for text in texts) == 0:
            raise InputError("no text to make passages of")
        self._texts, self._size, self._seed = list(texts), size, seed
        self._rows = max(1, batch_tokens // size)
        self._weights = None if weights is None or set(weights) == {1.0} else tuple(weights)
        self._cuts: dict[int, _BlockSpans] = {}
        self._lock = threading.Lock()  # batches are fetched ahead from another thread

    def _epoch(self, epoch: int) -> _BlockSpans:
        with self._lock:
            if epoch not in self._cuts:
                kept = {number: cuts for number, cuts in self._cuts.items() if number == epoch - 1}
                self._cuts = {**kept, epoch: self._make(epoch)}
            return self._cuts[epoch]

    def _make(self, epoch: int) -> _BlockSpans:
        draw = SeededRandom("passages", self._seed, epoch)
        cuts = block_spans(self._texts, self._size, [draw.below(self._size) for _ in self._texts])
        if self._weights is not None:
            corpora = np.array([text.corpus for text in self._texts])
            often = repeat_counts(corpora[cuts.stream], self._weights, SeededRandom("mixture", self._seed, epoch))
            cuts = cuts.part(np.repeat(np.arange(len(often)), often))
        return cuts.part(draw.permutation(len(cuts.begin)))

    def at(self, position: DataPosition) -> Batch:
        if not 0 <= position.index < self.batches_in(position.epoch):
            raise IndexError(f"batch {position.index} of an epoch of {self.batches_in(position.epoch)}")
        first = position.index * self._rows
        return _gather(self._texts, self._epoch(position.epoch), first, first + self._rows)

    def after(self, position: DataPosition) -> DataPosition:
        if position.index + 1 < self.batches_in(position.epoch):
            return DataPosition(position.epoch, position.index + 1)
        return DataPosition(position.epoch + 1, 0)

    def batches_in(self, epoch: int) -> int:
        return -(-len(self._epoch(epoch).begin) // self._rows)

    def padding(self, epoch: int) -> float:
        """Share of the slots of an epoch that hold no token."""
        cuts = self._epoch(epoch)
        lengths = cuts.end - cuts.begin
        widest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), self._rows))
        counts = np.diff(np.append(np.arange(0, len(lengths), self._rows), len(lengths)))
        return 1 - int(lengths.sum()) / int((widest * counts).sum())


def consecutive_blocks(texts: Sequence[TokenStream], size: int, batch_tokens: int) -> Iterator[Batch]:
    """Every passage once, in order, from the beginning of each text: how held-out text is read."""
    cuts, rows = block_spans(texts, size, [0] * len(texts)), max(1, batch_tokens // size)
    for first in range(0, len(cuts.begin), rows):
        yield _gather(texts, cuts, first, first + rows)


def _gather(texts: Sequence[TokenStream], cuts: _BlockSpans, first: int, last: int) -> Batch:
    some = cuts.part(slice(first, last))
    lengths = some.end - some.begin
    values = np.full((len(lengths), int(lengths.max())), PAD, np.int64)  # B T
    for row, (number, begin, end) in enumerate(zip(some.stream, some.begin, some.end, strict=True)):
        values[row, : end - begin] = texts[int(number)].ids(int(begin), int(end))
    mask = np.arange(values.shape[1]) < lengths[:, None]
    target = Padded(torch.from_numpy(values), torch.from_numpy(mask))
    return Batch(target=target, rows=tuple(range(first, first + len(lengths))))
