"""Which rows of a store are meant, and how long they are, without a list of all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transduce.data.draws import CHUNK, Draw, Shuffle


class Rows:
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
        return (row for part in stretches(self) for row in part.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def stretches(rows: Rows | np.ndarray, size: int = CHUNK) -> Iterator[np.ndarray]:
    """The rows in order, some at a time."""
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


class Lengths:
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
        return sum(int(self[part].sum()) for part in stretches(Rows(len(self))))


class Mixture:
    """Rows of several corpora as often as their weights say: 2 is twice, 0.5 a random half, 1.5 all and a half again.

    Rows of a corpus stand together. Numbers 0 .. len - 1 stand for all that comes in an epoch, corpus after corpus.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], draw: Draw) -> None:
        whole = [int(weight) * size for weight, size in zip(weights, sizes, strict=True)]
        part = [round((weight - int(weight)) * size) for weight, size in zip(weights, sizes, strict=True)]
        if not sum(whole) + sum(part):
            whole = list(sizes)  # an epoch is never empty
        self._sizes, self._whole = np.array(sizes), np.array(whole)
        self._first = np.cumsum(self._sizes) - self._sizes
        self._ends = np.cumsum(self._whole + np.array(part))
        self._orders = [Shuffle(size, draw) for size in sizes]

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


def corpus_sizes(rows: Rows | np.ndarray, corpus_of: np.ndarray, corpora: int) -> list[int]:
    """How many of these rows, which are in order, belong to each corpus; corpora stand one after the other."""
    everything = range(len(rows))
    edges = [
        bisect_left(everything, number, key=lambda place: int(corpus_of[rows[place]])) for number in range(corpora)
    ]
    return np.diff([*edges, len(rows)]).tolist()
