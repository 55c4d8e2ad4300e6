"""Language-model blocks: fixed-size blocks of running text, by data position.

A file is one stream of ids from <s> to </s>. A block of N tokens is a row of N + 1 ids: every id but the first is
predicted, and the last one begins the next block, so each token is predicted exactly once per epoch. Block boundaries
are random in every epoch, and blocks come in random order. The first and the last block of a file may be shorter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from transduce.data.batching import DataPosition
from transduce.data.row_selection import RowSubset, SeededRandom, repeat_counts
from transduce.data.store import Store
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD, Batch, Padded


@dataclass(frozen=True)
class TokenStream:
    """Consecutive chunks of one file as ids between <s> and </s>, read on demand.

    `has_eos` is False where the text continues in held-out chunks: then no </s> is predicted.
    """

    content: np.ndarray  # memory-mapped
    corpus: int
    has_eos: bool = True

    def __len__(self) -> int:
        return 1 + len(self.content) + self.has_eos

    def ids(self, begin: int, end: int) -> np.ndarray:
        """The ids from position `begin` up to `end`; <s> is at position 0."""
        inner = self.content[max(begin - 1, 0) : max(end - 1, 0)].astype(np.int64)
        first = [BOS] if begin == 0 < end else []
        last = [EOS] if self.has_eos and begin < len(self) == end else []
        return np.concatenate([np.array(part, np.int64) for part in (first, inner, last)])


def token_streams(store: Store, rows: RowSubset | np.ndarray) -> list[TokenStream]:
    """These chunks of a store as streams, one per file; the rows of one file are consecutive."""
    rows = np.asarray(rows)
    corpus_of = store.corpus_of[rows]
    edges = [0, *(np.flatnonzero(np.diff(corpus_of)) + 1).tolist(), len(rows)]
    streams = []
    for begin, end in pairwise(edges):
        corpus, last = int(corpus_of[begin]), int(rows[end - 1]) + 1
        continues = last < len(store) and int(store.corpus_of[last]) == corpus
        streams.append(TokenStream(store.id_range("target", int(rows[begin]), last), corpus, has_eos=not continues))
    return streams


def hold_out_end(store: Store, tokens: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(train, development) chunks: the end of every file is held out, about `tokens` tokens in total."""
    lengths = store.lengths[:, 1].astype(np.int64)
    total = int(lengths.sum())
    share = (min(total / 10, 100_000) if tokens is None else tokens) / max(total, 1)
    held_out = np.zeros(len(store), bool)
    for corpus in np.unique(store.corpus_of):
        chunks = np.flatnonzero(store.corpus_of == corpus)
        from_end = np.cumsum(lengths[chunks][::-1])  # tokens from the end of the file
        count = int(np.searchsorted(from_end, share * from_end[-1], "right"))
        count = max(count, 1) if len(chunks) > 1 else 0
        held_out[chunks[len(chunks) - count :]] = True
    if not held_out.any() or held_out.all():
        raise InputError(
            f"cannot hold out the end of a text of {total:,} tokens",
            remedy="give more text, another data.dev_size, or a file of held-out text: data.dev",
        )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


@dataclass(frozen=True)
class _BlockSpans:
    """The blocks of one epoch in order: the stream of each, and its span in the stream."""

    stream: np.ndarray
    begin: np.ndarray  # position of the first id
    end: np.ndarray  # position after the last id

    def select(self, rows: np.ndarray | slice) -> _BlockSpans:
        return _BlockSpans(self.stream[rows], self.begin[rows], self.end[rows])


def block_spans(streams: Sequence[TokenStream], size: int, offsets: Sequence[int]) -> _BlockSpans:
    """All blocks, stream after stream: the first block of each has `offset` tokens (0: `size`), the others `size`."""
    parts = []
    for number, (stream, offset) in enumerate(zip(streams, offsets, strict=True)):
        last = len(stream) - 1  # position of the last id; nothing is predicted after it
        begins = np.arange(offset - size if offset and last else 0, last, size).clip(min=0)
        ends = np.append(begins[1:], last)[: len(begins)] + 1
        parts.append((np.full(len(begins), number), begins, ends))
    return _BlockSpans(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class BlockBatches:
    """Endless batches of blocks, epoch after epoch; a batch has as many blocks as `batch_tokens` predicted tokens."""

    def __init__(
        self,
        streams: Sequence[TokenStream],
        block_size: int,
        *,
        batch_tokens: int,
        seed: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        if sum(len(stream) - 1 for stream in streams) == 0:
            raise InputError("the training text is empty")
        self._streams, self._block_size, self._seed = list(streams), block_size, seed
        self._rows = max(1, batch_tokens // block_size)
        self._weights = None if weights is None or set(weights) == {1.0} else tuple(weights)
        self._spans: dict[int, _BlockSpans] = {}
        self._lock = threading.Lock()  # batches are prefetched in another thread

    def _epoch(self, epoch: int) -> _BlockSpans:
        with self._lock:
            if epoch not in self._spans:
                cached = {number: spans for number, spans in self._spans.items() if number == epoch - 1}
                self._spans = {**cached, epoch: self._make_spans(epoch)}
            return self._spans[epoch]

    def _make_spans(self, epoch: int) -> _BlockSpans:
        rng = SeededRandom("passages", self._seed, epoch)
        spans = block_spans(self._streams, self._block_size, [rng.below(self._block_size) for _ in self._streams])
        if self._weights is not None:
            corpora = np.array([stream.corpus for stream in self._streams])
            mixture = SeededRandom("mixture", self._seed, epoch)
            counts = repeat_counts(corpora[spans.stream], self._weights, mixture)
            spans = spans.select(np.repeat(np.arange(len(counts)), counts))
        return spans.select(rng.permutation(len(spans.begin)))

    def at(self, position: DataPosition) -> Batch:
        if not 0 <= position.index < self.batches_in(position.epoch):
            raise IndexError(f"batch {position.index} of an epoch of {self.batches_in(position.epoch)}")
        first = position.index * self._rows
        return _gather(self._streams, self._epoch(position.epoch), first, first + self._rows)

    def after(self, position: DataPosition) -> DataPosition:
        if position.index + 1 < self.batches_in(position.epoch):
            return DataPosition(position.epoch, position.index + 1)
        return DataPosition(position.epoch + 1, 0)

    def batches_in(self, epoch: int) -> int:
        return -(-len(self._epoch(epoch).begin) // self._rows)

    def padding(self, epoch: int) -> float:
        """Share of the slots of an epoch without a token."""
        spans = self._epoch(epoch)
        lengths = spans.end - spans.begin
        widest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), self._rows))
        counts = np.diff(np.append(np.arange(0, len(lengths), self._rows), len(lengths)))
        return 1 - int(lengths.sum()) / int((widest * counts).sum())


def consecutive_blocks(streams: Sequence[TokenStream], block_size: int, batch_tokens: int) -> Iterator[Batch]:
    """Every block once, in order, from the beginning of each stream: for held-out text."""
    spans, rows = block_spans(streams, block_size, [0] * len(streams)), max(1, batch_tokens // block_size)
    for first in range(0, len(spans.begin), rows):
        yield _gather(streams, spans, first, first + rows)


def _gather(streams: Sequence[TokenStream], spans: _BlockSpans, first: int, last: int) -> Batch:
    selected = spans.select(slice(first, last))
    lengths = selected.end - selected.begin
    values = np.full((len(lengths), int(lengths.max())), PAD, np.int64)  # B T
    for row, (number, begin, end) in enumerate(zip(selected.stream, selected.begin, selected.end, strict=True)):
        values[row, : end - begin] = streams[int(number)].ids(int(begin), int(end))
    mask = np.arange(values.shape[1]) < lengths[:, None]
    target = Padded(torch.from_numpy(values), torch.from_numpy(mask))
    return Batch(target=target, rows=tuple(range(first, first + len(lengths))))
