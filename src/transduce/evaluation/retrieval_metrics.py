"""Vectors enter; how high the right documents of queries rank leaves, and how well cosines order pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.contracts import Embedded, Metric, VectorMetric

TIE = 1e-6  # cosines closer than this are rounding: the vectors of one text differ by it from batch to batch
_CHUNK = 4_000_000  # cosines held at any one time: 16 MB


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return result


@dataclass(frozen=True, slots=True)
class Places:
    """Where the best right document of each query stands among the wrong ones."""

    above: np.ndarray  # Q: wrong documents that are closer to the query
    level: np.ndarray  # Q: wrong documents that are exactly as close


def places(embedded: Embedded) -> Places:
    one, other, right = unit(embedded.queries), unit(embedded.documents), embedded.right
    step = max(1, _CHUNK // max(1, len(other)))
    above, level = [], []
    for start in range(0, len(one), step):
        fit = one[start : start + step] @ other.T  # C M
        answers = right[start : start + step]
        best = np.array([fit[row, list(rows)].max() for row, rows in enumerate(answers)])[:, None]
        for row, rows in enumerate(answers):
            fit[row, list(rows)] = -np.inf  # a second right answer is no rival
        above.append((fit > best + TIE).sum(1))
        level.append((np.abs(fit - best) <= TIE).sum(1))
    return Places(np.concatenate(above), np.concatenate(level))


class Recall(VectorMetric):
    """Share of queries with a right document among the k closest (%); documents level with it stand in any order.

    Among `level` + 1 documents in random order after `above` others, the right one is within k with probability
    (k - above) / (level + 1), cut at 0 and 1. So vectors that are all alike earn what guessing earns.
    """

    k: int

    def statistics(self, embedded: Embedded) -> np.ndarray:
        found = places(embedded)
        hits = np.clip((self.k - found.above) / (found.level + 1), 0, 1)
        return np.stack([hits, np.ones_like(hits)], 1)

    def value(self, totals: np.ndarray) -> float:
        hits, count = totals
        return float(100 * hits / count) if count else 0.0


class RecallAt1(Recall):
    """Share of sources whose own target is the closest of all held-out targets (%)."""

    name = "recall@1"
    k = 1


class RecallAt10(Recall):
    """Share of sources whose own target is among the ten closest of all held-out targets (%)."""

    name = "recall@10"
    k = 10


class ReciprocalRank(Recall):
    """Mean reciprocal rank: 1 over the place of the own target among all held-out targets, averaged (x 100)."""

    name = "mrr"

    def statistics(self, embedded: Embedded) -> np.ndarray:
        found = places(embedded)
        # The mean of 1 / place over the places that a random order gives: a difference of harmonic numbers.
        harmonic = np.concatenate(([0.0], np.cumsum(1 / np.arange(1, len(embedded.documents) + 1))))
        shares = (harmonic[found.above + found.level + 1] - harmonic[found.above]) / (found.level + 1)
        return np.stack([shares, np.ones_like(shares)], 1)


def ranks(values: np.ndarray) -> np.ndarray:
    """1 for the smallest; equal values share the mean of their places."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: np.ndarray = (last - (counts - 1) / 2)[which]
    return result


class Spearman(Metric):
    """Rank correlation of cosines with gold similarities (Spearman 1904; x 100): Pearson's of their ranks.

    The ranks are those in the whole set, so a resample keeps them and the statistics add up.
    """

    name = "spearman"

    def statistics(self, said: Sequence[float], gold: Sequence[float]) -> np.ndarray:
        # Counted from the middle: it changes no correlation and keeps the sums small.
        middle = (len(said) + 1) / 2
        x, y = (ranks(np.asarray(values, dtype=float)) - middle for values in (said, gold))
        return np.stack([x, y, x * x, y * y, x * y, np.ones_like(x)], 1)

    def value(self, totals: np.ndarray) -> float:
        x, y, xx, yy, xy, count = totals
        spread = (xx * count - x * x) * (yy * count - y * y)
        return float(100 * (xy * count - x * y) / np.sqrt(spread)) if spread > 0 else 0.0
