"""Epoch plan: the batches of one epoch as row numbers, a pure function of the seed and the epoch.

A bucket is a contiguous part of a random permutation of the rows, which is computed, not stored (rng.py). Only the
buckets in use are in memory; of the others the plan knows where they begin and how many batches they have.

Padding has two sides: a batch is as wide as its longest source and its longest target. Sorting by one side leaves the
other ragged. So a bucket is sorted by the longer side and cut into strips of two or three batches; inside a strip rows
are sorted by the difference of the two sides, ascending and descending in turn, which keeps both sides of a batch
similar. On 20,000 pairs of log-normal lengths (about 25 tokens, target within a quarter of the source) in batches of
4,096 tokens this pads 9 %, while sorting by source, then target, pads 20 %. Larger batches, small buckets and little
data pad more.

Packed batches (several pairs in a row) always have the same shape and almost no padding, so on a GPU one CUDA graph
serves every update. They are not sorted: the pairs of a bucket are assigned to bins (rows of a packed batch), and a
batch is a fixed number of bins. Pairs too long for a bin go into padded batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from transduce.data.rng import CHUNK, SeededRandom
from transduce.flow import BOS, PAD, Batch, PackedLayout, Padded

TARGET_FILL = 0.99  # initial number of bins: total length / capacity / this; pairs that do not fit open further bins
SIMILAR_PAIRS = 64  # pairs of similar length among which the best for both sides of a bin are chosen
LENGTH_MULTIPLE = 16  # row lengths are multiples of this
# Maximum row length of the short-row attention kernel. Attention over rows of 64, forward and backward, took 66
# microseconds a layer where rows of 128 took 140 (16,384 tokens), but rows of 64 were filled to 87 %, of 128 to 95 %.
ROW_LENGTH = 128

Ragged = tuple[np.ndarray, np.ndarray]  # ids of several sequences end to end, and the length of each
STRIP = 0.25  # batches in a strip, as a share of the square root of the batches in the bucket
CACHED_BUCKETS = 4  # readers in several threads are never far apart


@dataclass(frozen=True)
class Packing:
    """The shape of a packed batch."""

    rows: int  # B
    source: int  # S
    target: int  # T

    @classmethod
    def for_budget(cls, budget: int, lengths: np.ndarray) -> Packing | None:
        """The shape for batches of `budget` tokens, given packed lengths (n, 2); None: one row exceeds the budget.

        The side that is longer in total gets the maximum row length.
        """
        totals = lengths.sum(0)
        source, target = (
            LENGTH_MULTIPLE * math.ceil(ROW_LENGTH * side / totals.max() / LENGTH_MULTIPLE) for side in totals
        )
        rows = budget // (source + target)
        return cls(rows, source, target) if rows else None

    @property
    def slots(self) -> int:
        return self.rows * (self.source + self.target)

    @property
    def capacity(self) -> np.ndarray:
        """(2): source and target positions of a row."""
        return np.array([self.source, self.target])

    def fits(self, widths: np.ndarray) -> np.ndarray:
        """Which pairs of these widths (n, 2) fit into a row; the others go into padded batches."""
        return np.all(packed_lengths(widths) <= self.capacity, axis=1)

    def pack(self, sides: tuple[Ragged, Ragged], bins: np.ndarray) -> Batch:
        """Packs sources `x1 .. xm </s>` and targets `y1 .. yn </s>`, pair i into row bins[i]; `bins` is sorted."""
        (sources, source_lengths), (targets, target_lengths) = sides
        source = self._lay_out(sources, source_lengths, bins, self.source)
        labels = self._lay_out(targets, target_lengths, bins, self.target)
        assert labels.layout is not None
        segment_ids, positions = labels.layout.segment_ids, labels.layout.positions
        # Decoder inputs are the labels shifted right. Padding positions get the segment of the last pair, since
        # attention needs at least one visible position; no token of that pair attends to them.
        inputs = labels.values.roll(1, 1).masked_fill(positions == 0, BOS).masked_fill(~labels.mask, PAD)
        padded_segments = segment_ids.cummax(1).values
        target = Padded(inputs, labels.mask, PackedLayout(padded_segments, positions))
        return Batch(source, target, packed_labels=labels)

    def _lay_out(self, ids: np.ndarray, lengths: np.ndarray, bins: np.ndarray, width: int) -> Padded:
        """Sequences end to end in their rows."""
        begins = np.cumsum(lengths) - lengths
        first = np.searchsorted(bins, bins)  # of each pair: the first pair of its row
        pair = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(ids)) - begins[pair]
        slot = bins[pair] * width + (begins - begins[first])[pair] + position
        values, segment_ids, positions = (np.zeros(self.rows * width, np.int64) for _ in range(3))
        values[slot], segment_ids[slot], positions[slot] = ids, (np.arange(len(bins)) - first + 1)[pair], position
        tensors = [torch.from_numpy(part.reshape(self.rows, width)) for part in (values, segment_ids, positions)]
        return Padded(tensors[0], tensors[1] > 0, PackedLayout(*tensors[1:]))


def packed_lengths(widths: np.ndarray) -> np.ndarray:
    """Positions of both sides in a packed row, from slots in a padded batch: decoder inputs are one shorter."""
    return widths - np.array([0, 1])


def assign_bins(widths: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """A bin for each pair, counted from 0: in rounds, longest pairs first, to the bins with the most free space.

    Pairs of similar length are distributed so that both sides of a bin fill up equally. On 70,000 pairs of log-normal
    lengths (about 25 tokens, target within a quarter of the source) bins of 128 and 128 positions are filled to 95 %.
    """
    needed, bins, opened = packed_lengths(widths), np.zeros(len(widths), np.int64), 0
    left = np.argsort(-needed.max(1), kind="stable")
    while len(left):
        count = max(1, math.ceil((needed[left].sum(0) / capacity).max() / TARGET_FILL))
        free, missed = np.tile(capacity, (count, 1)), []
        for begin in range(0, len(left), count):
            pairs = left[begin : begin + count]
            candidates = np.argsort(-free.min(1), kind="stable")[: len(pairs)]
            strip = np.arange(len(pairs)) // SIMILAR_PAIRS
            pairs = pairs[np.lexsort((needed[pairs] @ [1, -1], strip))]
            candidates = candidates[np.lexsort((free[candidates] @ [1, -1], strip))]
            fits = (needed[pairs] <= free[candidates]).all(1)
            bins[pairs[fits]] = opened + candidates[fits]
            free[candidates[fits]] -= needed[pairs[fits]]
            missed.append(pairs[~fits])
        opened += count
        left = np.concatenate(missed)
        left = left[np.argsort(-needed[left].max(1), kind="stable")]
    return bins


class IndexMap(Protocol):
    """A mapping from the integers below its length to integers; an array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class PlannedBatch:
    """The rows of a batch."""

    rows: np.ndarray
    bins: np.ndarray | None = None  # the bin of each row in a packed batch, ascending; None: the batch is padded


@dataclass(frozen=True)
class _Bucket:
    """The batches of a bucket, in random order, as spans of its rows."""

    rows: np.ndarray
    bins: np.ndarray  # of each row; -1: its batch is not packed
    begins: np.ndarray
    ends: np.ndarray
    slots: int
    tokens: int

    def batch(self, index: int) -> PlannedBatch:
        span = slice(self.begins[index], self.ends[index])
        return PlannedBatch(self.rows[span], self.bins[span] if self.bins[span.start] >= 0 else None)


class EpochPlan:
    """The batches of an epoch.

    `widths` (n, 2) gives the slots of source and target of a row, special tokens included; `order` gives the row at
    each position of the epoch, before buckets are sorted. `budget` is the number of slots per batch.
    """

    def __init__(
        self,
        widths: IndexMap,
        order: IndexMap,
        budget: int,
        bucket_batches: int,
        rng: SeededRandom,
        packing: Packing | None = None,
    ) -> None:
        self._widths, self._order, self._budget, self._packing = widths, order, budget, packing
        # A short first batch shifts all others; without it, data smaller than a bucket would form the same batches in
        # every epoch.
        self._short, self._seed = rng.below(budget), rng.below(2**63)
        self._edges = self._bucket_edges(bucket_batches * budget)
        self.bucket = lru_cache(CACHED_BUCKETS)(self._make_bucket)
        counts, slots, tokens = [], 0, 0
        for number in range(len(self._edges) - 1):
            bucket = self._make_bucket(number)
            counts.append(len(bucket.begins))
            slots, tokens = slots + bucket.slots, tokens + bucket.tokens
        self._ends = np.cumsum(counts)
        self.padding = 1 - tokens / slots  # share of the slots without a token

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, index: int) -> PlannedBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of an epoch of {len(self)}")
        number = int(np.searchsorted(self._ends, index, "right"))
        return self.bucket(number).batch(index - (int(self._ends[number - 1]) if number else 0))

    def _bucket_edges(self, capacity: int) -> list[int]:
        """The first position of each bucket of about `capacity` slots, and the end of the last bucket."""
        edges, before, last = [], 0, -1
        for begin in range(0, len(self._order), CHUNK):
            rows = self._order[np.arange(begin, min(begin + CHUNK, len(self._order)))]
            sizes = self._widths[rows].sum(1, dtype=np.int64)
            filled = before + np.cumsum(sizes)
            buckets = (filled - sizes) // capacity
            edges += (begin + np.flatnonzero(np.diff(buckets, prepend=last))).tolist()
            before, last = int(filled[-1]), int(buckets[-1])
        return [*edges, len(self._order)]

    def _make_bucket(self, number: int) -> _Bucket:
        rows = self._order[np.arange(*self._edges[number : number + 2])]
        widths = self._widths[rows]
        short = np.zeros(len(rows), bool) if self._packing is None else self._packing.fits(widths)
        rng = SeededRandom("batches", self._seed, number)
        packed = _empty_bucket()
        if self._packing is not None:
            packed = _packed_bucket(rows[short], widths[short], self._packing, rng)
        padded = self._padded_bucket(rows[~short])
        begins = np.concatenate((packed.begins, len(packed.rows) + padded.begins))
        ends = np.concatenate((packed.ends, len(packed.rows) + padded.ends))
        order = rng.permutation(len(begins))
        return _Bucket(
            np.concatenate((packed.rows, padded.rows)),
            np.concatenate((packed.bins, padded.bins)),
            begins[order],
            ends[order],
            packed.slots + padded.slots,
            packed.tokens + padded.tokens,
        )

    def _padded_bucket(self, rows: np.ndarray) -> _Bucket:
        """Batches of rows of similar lengths."""
        if not len(rows):
            return _empty_bucket()
        rows = _sort(rows, self._widths, self._budget)
        widths = self._widths[rows]
        filled = np.cumsum(widths.sum(1, dtype=np.int64))
        head = int(np.searchsorted(filled, self._short))
        begins = np.concatenate(
            (batch_starts(widths[:head], self._budget), head + batch_starts(widths[head:], self._budget))
        )
        ends = np.append(begins[1:], len(rows))
        widest = np.maximum.reduceat(widths, begins, axis=0).sum(1, dtype=np.int64)
        slots = int((widest * (ends - begins)).sum())
        return _Bucket(rows, np.full(len(rows), -1), begins, ends, slots, int(filled[-1]))


def _empty_bucket() -> _Bucket:
    none = np.zeros(0, np.int64)
    return _Bucket(none, none, none, none, 0, 0)


def _packed_bucket(rows: np.ndarray, widths: np.ndarray, packing: Packing, rng: SeededRandom) -> _Bucket:
    """Bins in random order, `packing.rows` to a batch."""
    if not len(rows):
        return _empty_bucket()
    bins = assign_bins(widths, packing.capacity)
    bins = rng.permutation(int(bins.max()) + 1)[bins]
    order = np.argsort(bins, kind="stable")
    batches, bins = np.divmod(bins[order], packing.rows)
    begins = np.flatnonzero(np.diff(batches, prepend=-1))
    ends = np.append(begins[1:], len(rows))
    return _Bucket(rows[order], bins, begins, ends, len(begins) * packing.slots, int(packed_lengths(widths).sum()))


def _sort(rows: np.ndarray, widths: IndexMap, budget: int) -> np.ndarray:
    """The rows of a bucket by strip of the longer side, then by difference; ties keep their random order."""
    source, target = widths[rows].T.astype(np.int64)
    by_length = np.lexsort((source + target, np.maximum(source, target)))
    rows, source, target = rows[by_length], source[by_length], target[by_length]
    filled = np.cumsum(source + target) / budget  # in batches
    strip = STRIP * math.sqrt(filled[-1])
    if strip < 2:
        return rows  # too few batches to balance both sides
    strips = filled // strip
    difference = np.where(strips % 2 == 0, source - target, target - source)
    return rows[np.lexsort((difference, strips))]


def batch_starts(widths: np.ndarray, budget: int) -> np.ndarray:
    """The first row of each batch when rows fill batches in this order: count * (widest source + target) <= budget.

    A row that exceeds the budget alone is a batch of its own.
    """
    starts = []
    begin, guess = 0, 64
    while begin < len(widths):
        window = widths[begin : begin + guess]
        slots = np.maximum.accumulate(window, 0).sum(1, dtype=np.int64) * np.arange(1, len(window) + 1)
        fitting = int(np.searchsorted(slots, budget, "right"))
        if fitting == len(window) and begin + guess < len(widths):
            guess *= 2
            continue
        starts.append(begin)
        begin += max(fitting, 1)
        guess = 2 * fitting + 8
    return np.array(starts, np.int64)
