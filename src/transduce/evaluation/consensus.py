"""Descriptions and what several people said of the same things enter; how much they agree leaves, line by line."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from transduce.contracts import TextMetric
from transduce.evaluation.references import References, pair_up

ORDERS = (1, 2, 3, 4)
SPREAD = 6.0  # sigma of the penalty for another length, in words
Vector = dict[tuple[str, ...], float]


def words(text: str) -> list[str]:
    """Lower case, in runs of letters and digits with apostrophes; punctuation is left out."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


def _counts(text: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[begin : begin + order]) for begin in range(len(text) - order + 1))


class Cider(TextMetric):
    """CIDEr-D: what most references say counts most, n-grams up to 4 (Vedantam 2015); 100 times its mean over lines.

    For each order, g_k is the count of n-gram k times log(lines / lines whose references hold k). A line's score is

        10 mean over orders and references of e^(-(l_c - l_r)^2 / (2 6^2)) sum_k min(c_k, r_k) r_k / (|c| |r|)

    with c and r the vectors g of hypothesis and reference, l their lengths. How rare an n-gram is follows from all
    lines that are scored together, so scores of different sets cannot be compared, nor does a single line have one.
    """

    name = "cider"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = [(words(said), [words(line) for line in lines]) for said, lines in pair_up(hypotheses, references)]
        held = [{gram for line in lines for n in ORDERS for gram in _counts(line, n)} for _, lines in pairs]
        lines_with = Counter(gram for grams in held for gram in grams)
        rows = [[self._line(said, lines, lines_with, len(pairs)), 1.0] for said, lines in pairs]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def _line(self, said: list[str], lines: list[list[str]], lines_with: Counter[tuple[str, ...]], total: int) -> float:
        def vector(text: list[str], order: int) -> Vector:
            counts = _counts(text, order)
            return {gram: count * math.log(total / max(1, lines_with[gram])) for gram, count in counts.items()}

        found = 0.0
        for order in ORDERS:
            own = vector(said, order)
            for line in lines:
                near = math.exp(-((len(said) - len(line)) ** 2) / (2 * SPREAD**2))
                found += near * _clipped_cosine(own, vector(line, order))
        return 10 * found / (len(ORDERS) * len(lines))

    def value(self, totals: np.ndarray) -> float:
        total, count = totals
        return float(100 * total / count) if count else 0.0

    @property
    def signature(self) -> str:
        return f"{self.name}-d|n:4|sigma:6|case:lc|tok:letters|punctuation:no|stem:no|df:references of the set|x100"


def _clipped_cosine(own: Vector, other: Vector) -> float:
    """A word said more often than the reference says it counts no more than that."""
    shared = sum(min(weight, other[gram]) * other[gram] for gram, weight in own.items() if gram in other)
    lengths = math.sqrt(sum(w * w for w in own.values())) * math.sqrt(sum(w * w for w in other.values()))
    return shared / lengths if lengths else 0.0
