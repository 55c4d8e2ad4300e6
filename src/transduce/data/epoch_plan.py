"""Lengths enter, the batches of one epoch leave as row numbers: a pure function of the seed and the epoch.

A pool is a stretch of a random order of the rows, which is computed, not kept (draws.py). Only the pools that are read
from are in memory; of the others it is known where they begin and how many batches they have.

Padding has two sides here: a batch is as wide as its longest source and its longest target. Sorting by one side leaves
the other ragged. So a pool is sorted by the longer side and cut into strips of two or three batches; inside a strip the
order is by the difference of the two sides, up and down in turn, which keeps both sides of a batch alike. On 20,000
pairs of log-normal lengths (about 25 tokens, target within a quarter of the source) in batches of 4,096 tokens this
pads 9 % where sorting by source, then target, pads 20 %. Larger batches, small pools and little data pad more.

Packed batches (packing.py) are not sorted: rows that several pairs share are dealt out over a pool, and a batch is so
many of those rows. Pairs that are too long for them are padded as ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from transduce.data.packing import Packing, assign_bins, packed_lengths
from transduce.data.rng import CHUNK, RandomPermutation, SeededRandom

STRIP = 0.25  # batches in a strip, for the square root of the batches in the pool
KEPT = 4  # pools in memory: readers in several threads are never far apart


class IndexMap(Protocol):
    """What gives a number for each number below its length; an array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class PlannedBatch:
    """The pairs of a batch."""

    rows: np.ndarray
    lines: np.ndarray | None = None  # which of them share a line of it, in order; None: each has its own


@dataclass(frozen=True)
class _Bucket:
    """The batches of a pool, as stretches of its rows in a random order."""

    rows: np.ndarray
    lines: np.ndarray  # of each: in which line of a packed batch it stands; -1: its batch is not packed
    begins: np.ndarray
    ends: np.ndarray
    slots: int
    tokens: int

    def batch(self, index: int) -> PlannedBatch:
        here = slice(self.begins[index], self.ends[index])
        return PlannedBatch(self.rows[here], self.lines[here] if self.lines[here.start] >= 0 else None)


class EpochPlan:
    """The batches of an epoch. `widths` (n, 2) tells the slots of source and target of rows, special tokens included;
    `order` tells which row comes at each place of the epoch, before pools are sorted."""

    def __init__(
        self,
        widths: IndexMap,
        order: IndexMap,
        budget: int,
        pool: int,
        draw: SeededRandom,
        packing: Packing | None = None,
    ) -> None:
        self._widths, self._order, self._budget, self._packing = widths, order, budget, packing
        # A short first batch moves all others, or data smaller than a pool would meet in the same batches every epoch.
        self._short, self._seed = draw.below(budget), draw.below(2**63)
        self._edges = self._pools(pool * budget)
        self.pool = lru_cache(KEPT)(self._make)
        counts, slots, tokens = [], 0, 0
        for number in range(len(self._edges) - 1):
            made = self._make(number)
            counts.append(len(made.begins))
            slots, tokens = slots + made.slots, tokens + made.tokens
        self._ends = np.cumsum(counts)
        self.padding = 1 - tokens / slots  # share of the slots that hold no token

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, index: int) -> PlannedBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of an epoch of {len(self)}")
        number = int(np.searchsorted(self._ends, index, "right"))
        return self.pool(number).batch(index - (int(self._ends[number - 1]) if number else 0))

    def _pools(self, most: int) -> list[int]:
        """Where pools begin when the rows fill them in their order, and the end of the last."""
        edges, before, last = [], 0, -1
        for begin in range(0, len(self._order), CHUNK):
            rows = self._order[np.arange(begin, min(begin + CHUNK, len(self._order)))]
            sizes = self._widths[rows].sum(1, dtype=np.int64)
            filled = before + np.cumsum(sizes)
            pools = (filled - sizes) // most
            edges += (begin + np.flatnonzero(np.diff(pools, prepend=last))).tolist()
            before, last = int(filled[-1]), int(pools[-1])
        return [*edges, len(self._order)]

    def _make(self, number: int) -> _Bucket:
        rows = self._order[np.arange(*self._edges[number : number + 2])]
        widths = self._widths[rows]
        short = np.zeros(len(rows), bool) if self._packing is None else self._packing.takes(widths)
        draw = SeededRandom("batches", self._seed, number)
        packed = (
            _empty_bucket()
            if self._packing is None
            else _packed_bucket(rows[short], widths[short], self._packing, draw)
        )
        padded = self._padded(rows[~short])
        begins = np.concatenate((packed.begins, len(packed.rows) + padded.begins))
        ends = np.concatenate((packed.ends, len(packed.rows) + padded.ends))
        order = draw.permutation(len(begins))
        return _Bucket(
            np.concatenate((packed.rows, padded.rows)),
            np.concatenate((packed.lines, padded.lines)),
            begins[order],
            ends[order],
            packed.slots + padded.slots,
            packed.tokens + padded.tokens,
        )

    def _padded(self, rows: np.ndarray) -> _Bucket:
        """Batches of rows of like lengths."""
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


def _packed_bucket(rows: np.ndarray, widths: np.ndarray, packing: Packing, draw: SeededRandom) -> _Bucket:
    """Lines that several rows share, in a random order, so many to a batch."""
    if not len(rows):
        return _empty_bucket()
    lines = assign_bins(widths, packing.room)
    lines = draw.permutation(int(lines.max()) + 1)[lines]
    order = np.argsort(lines, kind="stable")
    batches, lines = np.divmod(lines[order], packing.rows)
    begins = np.flatnonzero(np.diff(batches, prepend=-1))
    ends = np.append(begins[1:], len(rows))
    return _Bucket(rows[order], lines, begins, ends, len(begins) * packing.slots, int(packed_lengths(widths).sum()))


def _sort(rows: np.ndarray, widths: IndexMap, budget: int) -> np.ndarray:
    """The rows of a pool by strip of the longer side, then difference; equal ones stay in their random order."""
    source, target = widths[rows].T.astype(np.int64)
    by_length = np.lexsort((source + target, np.maximum(source, target)))
    rows, source, target = rows[by_length], source[by_length], target[by_length]
    filled = np.cumsum(source + target) / budget  # batches
    strip = STRIP * math.sqrt(filled[-1])
    if strip < 2:
        return rows  # too few batches to share out over two sides
    strips = filled // strip
    difference = np.where(strips % 2 == 0, source - target, target - source)
    return rows[np.lexsort((difference, strips))]


def batch_starts(widths: np.ndarray, budget: int) -> np.ndarray:
    """Where batches begin when rows in this order fill them: count * (widest source + widest target) <= budget.

    A row that is too wide alone is a batch of its own.
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


def repeat_counts(corpus_of: np.ndarray, weights: Sequence[float], draw: SeededRandom) -> np.ndarray:
    """How often each row comes in an epoch: weight 2 is twice, 0.5 a random half, 1.5 all once and a half again."""
    result = np.zeros(len(corpus_of), np.int64)
    order = draw.permutation(len(corpus_of))
    for corpus, weight in enumerate(weights):
        members = order[corpus_of[order] == corpus]
        result[members] = int(weight)
        result[members[: round((weight - int(weight)) * len(members))]] += 1
    return result if result.any() else np.ones_like(result)  # an epoch is never empty


class RowSubset:
    """The rows 0 .. n - 1 in order, but for a few that are left out: only those are kept."""

    def __init__(self, n: int, without: np.ndarray | Sequence[int] = ()) -> None:
        out = np.sort(np.asarray(without, np.int64))
        self._size, self._gaps = n - len(out), out - np.arange(len(out))  # rows before each that is left out

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, slice):
            return self[np.arange(*places.indices(self._size))]
        return places + np.searchsorted(self._gaps, places, "right")

    def __iter__(self) -> Iterator[int]:
        return (row for part in chunks(self) for row in part.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def chunks(rows: RowSubset | np.ndarray, size: int = CHUNK) -> Iterator[np.ndarray]:
    """The rows in order, some at a time."""
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


class PairLengths:
    """(n, 2) int32: how long both sides of each row are, computed from where they end when it is asked for."""

    def __init__(self, source_ends: np.ndarray, target_ends: np.ndarray, source_rows: np.ndarray | None) -> None:
        self._ends, self._source_rows = (source_ends, target_ends), source_rows

    def __len__(self) -> int:
        return len(self._ends[1])

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, columns = key if isinstance(key, tuple) else (key, None)
        rows = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        if columns is not None:
            return self._side(columns, rows)
        return np.stack([self._side(column, rows) for column in (0, 1)], -1)

    def _side(self, column: int, rows: np.ndarray) -> np.ndarray:
        if column == 0 and self._source_rows is not None:
            return self._source_rows[rows].astype(np.int32)
        ends = self._ends[column]
        return np.asarray(ends[rows] - np.where(rows > 0, ends[rows - 1], 0)).astype(np.int32)

    def sum(self) -> int:
        return sum(int(self[part].sum()) for part in chunks(RowSubset(len(self))))


class CorpusMixture:
    """Rows of several corpora as often as their weights say: 2 is twice, 0.5 a random half, 1.5 all and a half again.

    Rows of a corpus stand together. Numbers 0 .. len - 1 stand for all that comes in an epoch, corpus after corpus.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], draw: SeededRandom) -> None:
        whole = [int(weight) * size for weight, size in zip(weights, sizes, strict=True)]
        part = [round((weight - int(weight)) * size) for weight, size in zip(weights, sizes, strict=True)]
        if not sum(whole) + sum(part):
            whole = list(sizes)  # an epoch is never empty
        self._sizes, self._whole = np.array(sizes), np.array(whole)
        self._first = np.cumsum(self._sizes) - self._sizes
        self._ends = np.cumsum(self._whole + np.array(part))
        self._orders = [RandomPermutation(size, draw) for size in sizes]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Places of the rows that these numbers stand for."""
        corpus = np.searchsorted(self._ends, numbers, "right")
        begins = np.concatenate(([0], self._ends[:-1]))
        inner, whole = numbers - begins[corpus], self._whole[corpus]
        places = inner % np.maximum(self._sizes[corpus], 1)
        for number, order in enumerate(self._orders):  # what remains of a corpus is drawn from it
            drawn = np.flatnonzero((corpus == number) & (inner >= whole))
            places[drawn] = order[(inner - whole)[drawn]]
        return self._first[corpus] + places


def corpus_sizes(rows: RowSubset | np.ndarray, corpus_of: np.ndarray, corpora: int) -> list[int]:
    """How many of these rows, which are in order, belong to each corpus; corpora stand one after the other."""
    everything = range(len(rows))
    edges = [
        bisect_left(everything, number, key=lambda place: int(corpus_of[rows[place]])) for number in range(corpora)
    ]
    return np.diff([*edges, len(rows)]).tolist()
