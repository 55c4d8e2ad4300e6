"""Row selection: subsets of a store, the development split, corpus mixing, and reproducible random permutations."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transduce.errors import InputError

CHUNK = 1 << 16  # numbers processed together; permutations up to this size are stored as an array
ROUNDS = 4


class SeededRandom:
    """Random numbers from the raw PCG64 stream, the only part of numpy's generators that is stable across versions."""

    def __init__(self, purpose: str, *seeds: int) -> None:
        # Hashed, since SeedSequence takes no negative seeds and cannot distinguish (7,) from (7, 0).
        digest = hashlib.sha256(repr((purpose, *seeds)).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def generator(self) -> np.random.Generator:
        """A numpy generator on the same stream, for numbers that need not be stable across versions."""
        return np.random.Generator(self._bits)

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1."""
        return int(self._bits.random_raw()) % n

    def permutation(self, n: int) -> np.ndarray:
        # The row number in the low bits makes every key unique, and sorting values is faster than sorting indices.
        bits = np.uint64(max(n - 1, 1).bit_length())
        keys: np.ndarray = self._bits.random_raw(n)
        keys >>= bits
        keys <<= bits
        keys |= np.arange(n, dtype=np.uint64)
        keys.sort()
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.view(np.int64)


class RandomPermutation:
    """A permutation of 0 .. n - 1 that is computed on demand, in constant memory.

    Rounds of x -> a x + c and x -> x ^ (x >> half) on integers of just enough bits; each step is invertible, so their
    composition is a permutation. Values of n or more are mapped again until they are below n (cycle walking). A short
    permutation is stored as an array: with few bits such rounds give too few different permutations.
    """

    def __init__(self, n: int, rng: SeededRandom) -> None:
        self._n, self._bits = n, max(n - 1, 1).bit_length()
        self._array = rng.permutation(n) if n <= CHUNK else None
        self._keys = [(rng.below(2**64) | 1, rng.below(2**64)) for _ in range(ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if self._array is not None:
            return self._array[indices]
        numbers = self._mix(indices.astype(np.uint64))
        while len(beyond := np.flatnonzero(numbers >= self._n)):
            numbers[beyond] = self._mix(numbers[beyond])
        return numbers.view(np.int64)

    def _mix(self, numbers: np.ndarray) -> np.ndarray:
        mask, half = np.uint64((1 << self._bits) - 1), np.uint64((self._bits + 1) // 2)
        for factor, constant in self._keys:
            numbers = (numbers * np.uint64(factor) + np.uint64(constant)) & mask
            numbers ^= numbers >> half
        return numbers


class RowSubset:
    """The rows 0 .. n - 1 in order, except a few; only the excluded rows are stored."""

    def __init__(self, n: int, excluded: np.ndarray | Sequence[int] = ()) -> None:
        out = np.sort(np.asarray(excluded, np.int64))
        self._size, self._gaps = n - len(out), out - np.arange(len(out))  # rows before each excluded one

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, indices: Any) -> Any:
        if isinstance(indices, slice):
            return self[np.arange(*indices.indices(self._size))]
        return indices + np.searchsorted(self._gaps, indices, "right")

    def __iter__(self) -> Iterator[int]:
        return (row for part in chunks(self) for row in part.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def chunks(rows: RowSubset | np.ndarray, size: int = CHUNK) -> Iterator[np.ndarray]:
    """The rows in order, `size` at a time."""
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


class PairLengths:
    """(n, 2) int32: the lengths of both sides of each row, computed on demand from their end offsets."""

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


def split(n: int, size: int, seed: int, groups: np.ndarray) -> tuple[RowSubset, np.ndarray]:
    """(train, development) rows in order; pairs of one group (an equal source) are never in both.

    Complete groups are selected until there are `size` pairs; a group larger than the remaining number is skipped.
    """
    if len(groups) != n or not 0 <= size < n:
        raise InputError(f"cannot split {size:,} development pairs off {n:,}", remedy="lower `data.dev_size`")
    salt = SeededRandom("split", seed).below(2**64)
    # Groups are selected in the order of their keys. Only keys below a limit, a few times the requested number, are
    # considered; if groups were too large, the limit doubles. Keys are uniform, so the limit does not bias the choice.
    share = 4 * (size + 100) / n
    development = np.zeros(0, np.int64)
    while len(development) < size:
        limit = min(int(share * 2**64), 2**64 - 1)
        development = np.sort(_select_groups(groups, salt, limit, size))
        if limit == 2**64 - 1:
            break
        share *= 2
    if size and not len(development):
        raise InputError(f"every source occurs in more than {size:,} pairs: no development set can be split off")
    return RowSubset(n, development), development


def _select_groups(groups: np.ndarray, salt: int, limit: int, size: int, chunk: int = 1 << 16) -> np.ndarray:
    """Rows of complete groups, at most `size`, in the order of their keys, of groups whose key is at most `limit`."""
    rows, keys = [], []
    for begin in range(0, len(groups), chunk):
        key = _mixed(groups[begin : begin + chunk] ^ np.uint64(salt))
        candidates = np.flatnonzero(key <= np.uint64(limit))
        rows.append(begin + candidates)
        keys.append(key[candidates])
    _, group_of, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)  # sorted by key
    chosen, remaining = np.zeros(len(counts), bool), size
    for group, count in enumerate(counts.tolist()):
        if count <= remaining:
            chosen[group] = True
            remaining -= count
        if not remaining:
            break
    return np.concatenate(rows)[chosen[group_of]]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """A bijective hash of 64-bit integers (splitmix64: Steele et al. 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


class CorpusMixture:
    """Rows of several corpora repeated by weight: 2 is twice, 0.5 a random half, 1.5 all once and half of them again.

    Rows of a corpus are contiguous. Indices 0 .. len - 1 enumerate the rows of an epoch, corpus after corpus.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], rng: SeededRandom) -> None:
        repeated = [int(weight) * size for weight, size in zip(weights, sizes, strict=True)]
        sampled = [round((weight - int(weight)) * size) for weight, size in zip(weights, sizes, strict=True)]
        if not sum(repeated) + sum(sampled):
            repeated = list(sizes)  # an epoch is never empty
        self._sizes, self._repeated = np.array(sizes), np.array(repeated)
        self._first = np.cumsum(self._sizes) - self._sizes
        self._ends = np.cumsum(self._repeated + np.array(sampled))
        self._orders = [RandomPermutation(size, rng) for size in sizes]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """The rows at these indices of the epoch."""
        corpus = np.searchsorted(self._ends, indices, "right")
        begins = np.concatenate(([0], self._ends[:-1]))
        inner, repeated = indices - begins[corpus], self._repeated[corpus]
        rows = inner % np.maximum(self._sizes[corpus], 1)
        for number, order in enumerate(self._orders):  # the fractional part is sampled without replacement
            sampled = np.flatnonzero((corpus == number) & (inner >= repeated))
            rows[sampled] = order[(inner - repeated)[sampled]]
        return self._first[corpus] + rows


def corpus_sizes(rows: RowSubset | np.ndarray, corpus_of: np.ndarray, corpora: int) -> list[int]:
    """The number of these sorted rows in each corpus; the rows of a corpus are contiguous."""
    indices = range(len(rows))
    edges = [bisect_left(indices, number, key=lambda index: int(corpus_of[rows[index]])) for number in range(corpora)]
    return np.diff([*edges, len(rows)]).tolist()


def repeat_counts(corpus_of: np.ndarray, weights: Sequence[float], rng: SeededRandom) -> np.ndarray:
    """How often each row occurs in an epoch, by the weight of its corpus: see `CorpusMixture`."""
    counts = np.zeros(len(corpus_of), np.int64)
    order = rng.permutation(len(corpus_of))
    for corpus, weight in enumerate(weights):
        members = order[corpus_of[order] == corpus]
        counts[members] = int(weight)
        counts[members[: round((weight - int(weight)) * len(members))]] += 1
    return counts if counts.any() else np.ones_like(counts)  # an epoch is never empty
