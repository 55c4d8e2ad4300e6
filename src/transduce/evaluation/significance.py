"""Statistical significance: bootstrap intervals, paired bootstrap, approximate randomisation.

A metric is a function of summed per-line statistics, so a resample of n lines is a row of n counts, and the totals
of all resamples are one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from transduce.contracts import Metric
from transduce.errors import InputError

SIGNIFICANCE_LEVEL = 0.05
_CHUNK = 4_000_000  # elements of the count matrix at a time: 32 MB
_TIE = 1e-9  # smaller differences are rounding errors


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A score with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedTestResult:
    """Score difference of two systems on the same lines, its 95 % interval, and the p-value."""

    difference: float
    low: float
    high: float
    p_value: float  # two-sided
    higher_is_better: bool = True


def bootstrap_interval(
    metric: Metric, statistics: np.ndarray, resamples: int, seed: int, level: float = 0.95
) -> ConfidenceInterval:
    """Percentile bootstrap over lines (Efron 1979; for corpus scores Koehn 2004).

    Resamples of lines that are all right, or all wrong, are equal. Rates then have the score interval (Wilson 1927):
    100 right lines of 100 say 96.3 to 100.
    """
    if (rate := _unanimous_rate(statistics)) is not None:
        count, z = len(statistics), NormalDist().inv_cdf((1 + level) / 2)
        edge = count / (count + z * z) if rate else z * z / (count + z * z)
        low, high = sorted(metric.value(np.array([one * count, count])) for one in (rate, edge))
        return ConfidenceInterval(metric.value(statistics.sum(0)), low, high)
    scores = _scores(metric, _resampled(statistics, resamples, seed))
    low, high = _range(scores, level)
    return ConfidenceInterval(metric.value(statistics.sum(0)), low, high)


def paired_bootstrap(metric: Metric, a: np.ndarray, b: np.ndarray, resamples: int, seed: int) -> PairedTestResult:
    """Paired bootstrap: both systems are scored on the same resampled lines; `difference` is a minus b.

    Under the null hypothesis the resampled differences are distributed around 0 as they are here around their mean,
    so p = P(|d - mean d| >= |observed|), with 1 added to numerator and denominator so that p is never 0.
    sacrebleu takes |d| before it subtracts the mean, which leaves one tail only: its p is about half of this one,
    and at 0.05 it declares equal systems different in about 11 comparisons of 100 (simulated; this test in 6).
    """
    _check_same_lines(a, b)
    totals = _resampled(np.hstack([a, b]), resamples, seed)
    width = a.shape[1]
    differences = _scores(metric, totals[:, :width]) - _scores(metric, totals[:, width:])
    observed = metric.value(a.sum(0)) - metric.value(b.sum(0))
    low, high = _range(differences, 0.95)
    p = _p_value(differences - differences.mean(), observed)
    return PairedTestResult(observed, low, high, p, metric.higher_is_better)


def approximate_randomisation(
    metric: Metric, a: np.ndarray, b: np.ndarray, resamples: int, seed: int
) -> PairedTestResult:
    """Approximate randomisation (Noreen 1989; Riezler and Maxwell 2005): random swaps of the outputs of a line.

    The p-value is that of the permutation test, the interval that of the bootstrap.
    """
    result = paired_bootstrap(metric, a, b, resamples, seed)
    generator = np.random.default_rng(seed)
    both, half = a.sum(0) + b.sum(0), []
    for rows in _chunks(resamples, len(a)):
        swaps = generator.integers(2, size=(rows, len(a)))
        half.append(a.sum(0) + swaps @ (b - a))  # the totals of the first pseudo-system
    first = np.concatenate(half)
    differences = _scores(metric, first) - _scores(metric, both - first)
    return replace(result, p_value=_p_value(differences, result.difference))


def verdict(result: PairedTestResult, names: tuple[str, str]) -> str:
    """One sentence about the test. It names a better system only if the difference is significant."""
    p = result.p_value
    level = "p < 0.001" if p < 0.001 else f"p = {p:.{3 if p < 0.1 else 2}f}"
    if p >= SIGNIFICANCE_LEVEL:
        return f"no significant difference ({level})"
    first_wins = (result.difference > 0) == result.higher_is_better
    winner, loser = names if first_wins else names[::-1]
    low, high = sorted((abs(result.low), abs(result.high))) if result.low * result.high > 0 else (0.0, 0.0)
    span = f", 95 % interval {low:.2f} to {high:.2f}" if high else ""
    return f"{winner} is better than {loser} by {abs(result.difference):.2f}{span} ({level})"


def _unanimous_rate(statistics: np.ndarray) -> float | None:
    """0 or 1, if each line is one outcome, a hit or a miss, and all are the same; else None."""
    if statistics.ndim != 2 or statistics.shape[1] != 2 or not len(statistics) or (statistics[:, 1] != 1).any():
        return None
    hits = float(statistics[0, 0])
    return hits if hits in (0.0, 1.0) and (statistics[:, 0] == hits).all() else None


def _chunks(resamples: int, lines: int) -> list[int]:
    """Numbers of resamples to draw at a time."""
    size = max(1, _CHUNK // max(1, lines))
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def _resampled(statistics: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Summed statistics of `resamples` bootstrap samples: resamples x columns."""
    lines = len(statistics)
    if not lines:
        raise InputError("there are no lines to score")
    generator = np.random.default_rng(seed)
    probabilities = np.full(lines, 1 / lines)
    return np.concatenate(
        [generator.multinomial(lines, probabilities, size=rows) @ statistics for rows in _chunks(resamples, lines)]
    )


def _scores(metric: Metric, totals: np.ndarray) -> np.ndarray:
    return np.array([metric.value(row) for row in totals])


def _range(scores: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(scores, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _p_value(differences: np.ndarray, observed: float) -> float:
    extreme = int((np.abs(differences) >= abs(observed) - _TIE).sum())
    return (extreme + 1) / (len(differences) + 1)


def _check_same_lines(a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise InputError(
            f"a paired test needs the same lines: {len(a)} of one system, {len(b)} of the other",
            remedy="score both systems on the same file",
        )
