"""Retrieval metrics: recall@k, mean reciprocal rank, Spearman correlation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.contracts import EmbeddedCorpus, VectorMetric
from transduce.errors import InputError

TIE = 1e-6  # smaller differences of cosines are rounding errors: the vectors of a text vary with its batch
_CHUNK = 4_000_000  # number of cosines in memory at a time: 16 MB


def normalise_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows divided by their Euclidean norm; a row of zeros does not change."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return result


@dataclass(frozen=True, slots=True)
class Ranking:
    """The rank of the best relevant document of each query, as numbers of irrelevant documents."""

    closer: np.ndarray  # Q: irrelevant documents that are closer to the query
    tied: np.ndarray  # Q: irrelevant documents that are equally close


def rank_documents(embedded: EmbeddedCorpus) -> Ranking:
    queries, documents = normalise_rows(embedded.queries), normalise_rows(embedded.documents)
    step = max(1, _CHUNK // max(1, len(documents)))
    closer, tied = [], []
    for start in range(0, len(queries), step):
        cosines = queries[start : start + step] @ documents.T  # C M
        relevant = embedded.relevant[start : start + step]
        best = np.array([cosines[row, list(rows)].max() for row, rows in enumerate(relevant)])[:, None]
        for row, rows in enumerate(relevant):
            cosines[row, list(rows)] = -np.inf  # other relevant documents do not compete
        closer.append((cosines > best + TIE).sum(1))
        tied.append((np.abs(cosines - best) <= TIE).sum(1))
    return Ranking(np.concatenate(closer), np.concatenate(tied))


class Recall(VectorMetric):
    """Recall@k: queries with a relevant document among the k closest (%); ties are in random order.

    Among `tied` + 1 documents in random order after `closer` others, the relevant one is within k with probability
    (k - closer) / (tied + 1), clipped to [0, 1]. Thus identical vectors score as random guessing does.
    """

    k: int
    perfect = 100.0

    def statistics(self, embedded: EmbeddedCorpus) -> np.ndarray:
        ranking = rank_documents(embedded)
        hits = np.clip((self.k - ranking.closer) / (ranking.tied + 1), 0, 1)
        return np.stack([hits, np.ones_like(hits)], 1)

    def value(self, totals: np.ndarray) -> float:
        hits, count = totals
        return float(100 * hits / count) if count else 0.0


class RecallAt1(Recall):
    """Recall@1: sources whose target is the closest of all held-out targets (%)."""

    name = "recall@1"
    k = 1


class RecallAt10(Recall):
    """Recall@10: sources whose target is among the ten closest of all held-out targets (%)."""

    name = "recall@10"
    k = 10


class ReciprocalRank(Recall):
    """Mean reciprocal rank of the target of a source among all held-out targets (x 100)."""

    name = "mrr"

    def statistics(self, embedded: EmbeddedCorpus) -> np.ndarray:
        ranking = rank_documents(embedded)
        # The mean of 1 / rank over the ranks of a random order of ties: a difference of harmonic numbers.
        harmonic = np.concatenate(([0.0], np.cumsum(1 / np.arange(1, len(embedded.documents) + 1))))
        total = harmonic[ranking.closer + ranking.tied + 1] - harmonic[ranking.closer]
        reciprocal = total / (ranking.tied + 1)
        return np.stack([reciprocal, np.ones_like(reciprocal)], 1)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 for the smallest; equal values get the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: np.ndarray = (last - (counts - 1) / 2)[which]
    return result


class Spearman(VectorMetric):
    """Rank correlation of cosines and gold similarities (Spearman 1904; x 100): Pearson correlation of the ranks.

    The ranks are those of the whole set and are kept in a resample, so the statistics are additive.
    """

    name = "spearman"

    def statistics(self, embedded: EmbeddedCorpus) -> np.ndarray:
        if embedded.similarities is None:
            raise InputError(
                "spearman needs the gold similarity of every pair", remedy="write: sentence TAB sentence TAB similarity"
            )
        targets = embedded.documents[[rows[0] for rows in embedded.relevant]]
        cosines = (normalise_rows(embedded.queries) * normalise_rows(targets)).sum(-1)
        return self.pair_statistics(cosines, embedded.similarities)

    @staticmethod
    def pair_statistics(predicted: Sequence[float] | np.ndarray, gold: Sequence[float]) -> np.ndarray:
        """The statistics of predicted and gold similarities."""
        # Centred ranks: the correlation is the same and the sums are small.
        middle = (len(predicted) + 1) / 2
        x, y = (ranks(np.asarray(values, dtype=float)) - middle for values in (predicted, gold))
        return np.stack([x, y, x * x, y * y, x * y, np.ones_like(x)], 1)

    def value(self, totals: np.ndarray) -> float:
        x, y, xx, yy, xy, count = totals
        spread = (xx * count - x * x) * (yy * count - y * y)
        return float(100 * (xy * count - x * y) / np.sqrt(spread)) if spread > 0 else 0.0
