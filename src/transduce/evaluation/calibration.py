"""Calibrated confidence: isotonic regression of quality on model scores, expected calibration error, reliability."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transduce.errors import InputError
from transduce.evaluation.evaluate import SystemOutput, find_metric, line_statistics
from transduce.evaluation.overlap_metrics import References
from transduce.parsing import read_json
from transduce.storage import atomic_path, replace_file

Quality = Literal["exact", "chrf"]
QUALITIES: dict[Quality, str] = {
    "exact": "the probability that the output is exactly right",
    "chrf": "the expected chrF of the output, from 0 to 1",
}
MIN_EXACT = 0.05  # share of exactly right outputs below which exact match says little about a line
MIN_LINES = 20  # of a development set
FOLDS = 5
BINS = 10
MAX_BYTES = 64 * 2**20
FILE = "calibration.json"


def isotonic_regression(inputs: Sequence[float], outcomes: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The increasing step function with the least squared error, by pooling adjacent violators (Ayer et al. 1955).

    Returns the ends of its steps and their values; between two steps it is interpolated. Outcomes of equal inputs are
    averaged first.
    """
    knots, where = np.unique(np.asarray(inputs, float), return_inverse=True)
    weights = np.bincount(where).astype(float)
    means = np.bincount(where, np.asarray(outcomes, float)) / weights
    blocks: list[tuple[float, float, int, int]] = []  # mean, weight, first and last knot
    for knot, (mean, weight) in enumerate(zip(means, weights, strict=True)):
        block = (float(mean), float(weight), knot, knot)
        while blocks and blocks[-1][0] >= block[0]:
            left = blocks.pop()
            total = left[1] + block[1]
            block = ((left[0] * left[1] + block[0] * block[1]) / total, total, left[2], block[3])
        blocks.append(block)
    ends = [(knots[end], mean) for mean, _, first, last in blocks for end in dict.fromkeys((first, last))]
    return np.array([end for end, _ in ends]), np.array([mean for _, mean in ends])


def interpolated(inputs: Any, knots: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The values at these inputs, log-probabilities.

    Below the lowest knot nothing was observed, and the value falls with the probability: if all development outputs
    were right, an output that is less probable than each of them is not certain.
    """
    found: np.ndarray = np.interp(inputs, knots, values) * np.exp(np.minimum(np.asarray(inputs) - knots[0], 0.0))
    return found


@dataclass(frozen=True)
class ReliabilityBin:
    """The outputs whose confidence lies between two limits."""

    low: float
    high: float
    count: int
    confidence: float  # their mean confidence
    quality: float  # their mean quality


def reliability(confidences: Sequence[float], qualities: Sequence[float], bins: int = BINS) -> list[ReliabilityBin]:
    """The outputs in bins of equal width; empty bins are left out."""
    sure, right = np.asarray(confidences, float), np.asarray(qualities, float)
    numbers = np.minimum((sure * bins).astype(int), bins - 1)
    found = []
    for number in range(bins):
        inside = numbers == number
        if inside.any():
            means = float(sure[inside].mean()), float(right[inside].mean())
            found.append(ReliabilityBin(number / bins, (number + 1) / bins, int(inside.sum()), *means))
    return found


def expected_calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """ECE: the mean over all outputs of |mean confidence - mean quality| of their bin (Guo et al. 2017)."""
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.confidence - one.quality) for one in bins) / total if total else 0.0


@dataclass(frozen=True)
class Calibration:
    """The map from the log-probability of an output to its confidence, fitted on the development set."""

    quality: Quality
    inputs: tuple[float, ...]  # ascending
    values: tuple[float, ...]  # ascending, 0 to 1
    lines: int
    ece_before: float  # of the probability that the model gives its outputs
    ece_after: float  # of the confidence, by cross-validation

    def model_confidence(self, token_scores: Sequence[float]) -> float:
        """What the model says without calibration: the probability of the output, or the geometric mean of its tokens.

        The second is for chrF, which does not fall with the length of an output.
        """
        return math.exp(min(0.0, _input(self.quality, token_scores)))

    def confidence(self, token_scores: Sequence[float]) -> float:
        """The quality to expect of an output whose tokens have these log-probabilities, from 0 to 1."""
        given = _input(self.quality, token_scores)
        after = bisect_right(self.inputs, given)
        if not after:
            return float(interpolated(given, self.inputs, self.values))
        if after == len(self.inputs):
            return self.values[-1]
        (left, right), (low, high) = self.inputs[after - 1 : after + 1], self.values[after - 1 : after + 1]
        return (high - low) / (right - left) * (given - left) + low  # as numpy does it, in a third of the time

    def save(self, folder: Path) -> None:
        replace_file(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Calibration | None:
        """The calibration in this folder; None: it has none."""
        try:
            content = read_json(folder / FILE, max_bytes=MAX_BYTES, remedy="run `transduce calibrate` again")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls._checked(content, str(folder / FILE))

    @classmethod
    def _checked(cls, content: Any, where: str) -> Calibration:
        try:
            inputs, values = (tuple(map(float, content[name])) for name in ("inputs", "values"))
            errors = float(content["ece_before"]), float(content["ece_after"])
            made = cls(content["quality"], inputs, values, int(content["lines"]), *errors)
        except (KeyError, TypeError, ValueError):
            made = None
        if made is None or made.quality not in QUALITIES or not made._is_valid():
            raise InputError("not a calibration", where=where, remedy="run `transduce calibrate` again, or remove it")
        return made

    def _is_valid(self) -> bool:
        numbers = np.array([*self.inputs, *self.values])
        ascending = all((np.diff(part) >= 0).all() for part in (self.inputs, self.values))
        inside = self.values[0] >= 0 and self.values[-1] <= 1 if self.values else False
        return bool(len(self.inputs) == len(self.values) and inside and ascending and np.isfinite(numbers).all())


def _input(quality: Quality, token_scores: Sequence[float]) -> float:
    total = max(sum(token_scores), -1e9)
    return total if quality == "exact" else total / max(len(token_scores), 1)


def line_qualities(quality: Quality, output: SystemOutput, references: References) -> np.ndarray:
    """The quality of each output, from 0 to 1."""
    metric = find_metric(quality)
    return np.array([metric.value(row) for row in line_statistics(metric, output, references)]) / 100


def fit_calibration(output: SystemOutput, references: References) -> Calibration | None:
    """The calibration of outputs with references; None where there are too few lines or outputs without a score.

    The quality is exact match; chrF where fewer than 5 % of the outputs are exactly right.
    """
    scores = output.token_scores
    if scores is None or output.texts is None or len(scores) < MIN_LINES:
        return None
    quality: Quality = "exact"
    outcomes = line_qualities(quality, output, references)
    if outcomes.mean() < MIN_EXACT:
        quality = "chrf"
        outcomes = line_qualities(quality, output, references)
    inputs = np.array([_input(quality, one) for one in scores])
    before = expected_calibration_error(reliability(np.exp(np.minimum(inputs, 0.0)).tolist(), outcomes.tolist()))
    after = expected_calibration_error(reliability(cross_fitted(inputs, outcomes).tolist(), outcomes.tolist()))
    knots, values = isotonic_regression(inputs.tolist(), outcomes.tolist())
    return Calibration(quality, tuple(knots.tolist()), tuple(values.tolist()), len(scores), before, after)


def cross_fitted(inputs: np.ndarray, outcomes: np.ndarray, folds: int = FOLDS) -> np.ndarray:
    """The confidence of each line by a regression on the other folds, which has not seen its outcome."""
    fold = np.arange(len(inputs)) % folds
    found = np.zeros(len(inputs))
    for number in range(folds):
        rest = fold != number
        found[~rest] = interpolated(inputs[~rest], *isotonic_regression(inputs[rest].tolist(), outcomes[rest].tolist()))
    return found


@dataclass(frozen=True)
class CalibrationReport:
    """How well confidences agree with the qualities of held-out outputs, before and after calibration."""

    quality: Quality
    before: list[ReliabilityBin]
    after: list[ReliabilityBin]

    @property
    def ece_before(self) -> float:
        return expected_calibration_error(self.before)

    @property
    def ece_after(self) -> float:
        return expected_calibration_error(self.after)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ece_before": self.ece_before, "ece_after": self.ece_after}


def report_calibration(
    calibration: Calibration | None, output: SystemOutput, references: References, *, fitted_here: bool
) -> CalibrationReport | None:
    """The report on these outputs; None without a calibration, or without scores.

    `fitted_here`: the calibration was fitted on these lines, so the confidences are those of cross-validation.
    """
    scores = output.token_scores
    if calibration is None or scores is None or output.texts is None or not scores:
        return None
    outcomes = line_qualities(calibration.quality, output, references)
    before = [calibration.model_confidence(one) for one in scores]
    after = [calibration.confidence(one) for one in scores]
    if fitted_here and len(scores) >= MIN_LINES:
        after = cross_fitted(np.array([_input(calibration.quality, one) for one in scores]), outcomes).tolist()
    right = outcomes.tolist()
    return CalibrationReport(calibration.quality, reliability(before, right), reliability(after, right))


def draw_reliability(report: CalibrationReport, path: str | Path) -> None:
    """The reliability diagrams before and after calibration: quality against confidence, with the number of outputs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    parts: Mapping[str, list[ReliabilityBin]] = {"before calibration": report.before, "after": report.after}
    errors = (report.ece_before, report.ece_after)
    total = sum(one.count for one in report.before)
    for place, ((name, bins), error) in enumerate(zip(parts.items(), errors, strict=True)):
        axes = figure.add_subplot(1, 2, place + 1)
        middles, width = [(one.low + one.high) / 2 for one in bins], 1 / BINS
        axes.bar(middles, [one.count / total for one in bins], width, color="#dee2e6", label="share of outputs")
        axes.bar(middles, [one.quality for one in bins], width * 0.6, color="#3b5bdb", label=report.quality)
        axes.plot([0, 1], [0, 1], color="#868e96", linewidth=1, linestyle="--")
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=f"{name}: ECE {error:.3f}")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    with atomic_path(path) as part:
        figure.savefig(part)
