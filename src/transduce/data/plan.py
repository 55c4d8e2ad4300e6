"""Lengths enter, the batches of one epoch leave as row numbers: a pure function of the seed and the epoch.

Padding has two sides here: a batch is as wide as its longest source and its longest target. Sorting by one side leaves
the other ragged. So a pool is sorted by the longer side and cut into strips of two or three batches; inside a strip the
order is by the difference of the two sides, up and down in turn, which keeps both sides of a batch alike. On 20,000
pairs of log-normal lengths (about 25 tokens, target within a quarter of the source) in batches of 4,096 tokens this
pads 9 % where sorting by source, then target, pads 20 %. Larger batches, small pools and little data pad more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STRIP = 0.25  # batches in a strip, for the square root of the batches in the pool


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch, end to end."""

    rows: np.ndarray
    starts: np.ndarray  # where each batch begins in `rows`, and the end of the last
    padding: float  # share of the slots that hold no token

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of an epoch of {len(self)}")
        return self.rows[self.starts[index] : self.starts[index + 1]]


class Draw:
    """Random numbers that are the same in every version of numpy: only the raw stream is promised to stay."""

    def __init__(self, purpose: str, *numbers: int) -> None:
        # Hashed, since SeedSequence takes no negative seeds and cannot tell (7,) from (7, 0).
        digest = hashlib.sha256(repr((purpose, *numbers)).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def below(self, n: int) -> int:
        return int(self._bits.random_raw()) % n

    def permutation(self, n: int) -> np.ndarray:
        # The row number in the low bits makes every key unique, and sorting values is faster than sorting indices.
        bits = np.uint64(max(n - 1, 1).bit_length())
        # All in place: for a large corpus every array of this length counts.
        keys: np.ndarray = self._bits.random_raw(n)
        keys >>= bits
        keys <<= bits
        keys |= np.arange(n, dtype=np.uint64)
        keys.sort()
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.view(np.int64)


def plan_epoch(widths: np.ndarray, repeats: np.ndarray, budget: int, pool: int, draw: Draw) -> Plan:
    """widths (n, 2): slots of source and target, special tokens included; repeats (n,): how often each row comes."""
    rows = np.repeat(np.arange(len(widths)), repeats)
    rows = rows[draw.permutation(len(rows))]
    sizes = widths.sum(1, dtype=np.int64)
    edges = _pools(sizes[rows], pool * budget)
    # A short first batch moves all others, or data smaller than a pool would meet in the same batches every epoch.
    short = draw.below(budget)
    parts = []
    for begin, end in pairwise(edges):
        rows[begin:end] = _sort(rows[begin:end], widths, budget)
        head = begin + int(np.searchsorted(np.cumsum(sizes[rows[begin:end]]), short))
        parts += [part + cut(widths[rows[part:stop]], budget) for part, stop in ((begin, head), (head, end))]
    begins = np.concatenate(parts)
    counts = np.diff(begins, append=len(rows))
    widest = np.maximum.reduceat(widths[rows], begins, axis=0).sum(1, dtype=np.int64)
    order = draw.permutation(len(begins))
    starts = np.concatenate([[0], np.cumsum(counts[order])])
    moved = np.repeat(begins[order] - starts[:-1], counts[order])
    moved += np.arange(len(rows))
    rows = rows[moved]
    return Plan(rows, starts, 1 - int(sizes[rows].sum()) / int((widest * counts).sum()))


def _pools(sizes: np.ndarray, most: int) -> list[int]:
    """Where pools begin when rows of these sizes fill them, and the end of the last."""
    filled = np.cumsum(sizes)
    filled -= sizes
    filled //= most
    return [0, *(np.flatnonzero(filled[1:] != filled[:-1]) + 1).tolist(), len(sizes)]


def _sort(rows: np.ndarray, widths: np.ndarray, budget: int) -> np.ndarray:
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


def cut(widths: np.ndarray, budget: int) -> np.ndarray:
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


def repeats(corpus_of: np.ndarray, weights: Sequence[float], draw: Draw) -> np.ndarray:
    """How often each row comes in an epoch: weight 2 is twice, 0.5 a random half, 1.5 all once and a half again."""
    result = np.zeros(len(corpus_of), np.int64)
    order = draw.permutation(len(corpus_of))
    for corpus, weight in enumerate(weights):
        members = order[corpus_of[order] == corpus]
        result[members] = int(weight)
        result[members[: round((weight - int(weight)) * len(members))]] += 1
    return result if result.any() else np.ones_like(result)  # an epoch is never empty
