"""Outputs and references enter; scores with intervals and quality by source length leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from transduce.contracts import Embedded, Metric, Scored, ScoreMetric, TextMetric, VectorMetric
from transduce.errors import InputError
from transduce.evaluation.by_length import Bucket, by_length, draw_by_length
from transduce.evaluation.overlap_metrics import References, as_references
from transduce.evaluation.significance import Interval, Paired, interval, paired, randomised, verdict
from transduce.evaluation.text_metrics import METRICS, find

__all__ = [
    "METRICS",
    "Asked",
    "Bucket",
    "Evaluation",
    "Interval",
    "Outputs",
    "Paired",
    "Score",
    "by_length",
    "draw_by_length",
    "evaluate",
    "find",
    "interval",
    "paired",
    "randomised",
    "statistics_of",
    "verdict",
]


@dataclass(frozen=True)
class Asked:
    """What a model was given and asked for, where that is not a line of the file and its right answers."""

    sources: Sequence[str]
    references: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Outputs:
    """What a model made of the held-out lines, as far as the metrics ask for it."""

    texts: Sequence[str] | None = None  # for metrics that compare texts
    scored: Sequence[Scored] | None = None  # for metrics that read probabilities
    embedded: Embedded | None = None  # for metrics that compare vectors
    asked: Asked | None = None  # what the texts are compared with instead of the references


def statistics_of(metric: Metric, outputs: Outputs, references: References) -> np.ndarray:
    """The one place where the kinds of metrics part."""
    if isinstance(metric, TextMetric) and outputs.texts is not None:
        wanted = references if outputs.asked is None else outputs.asked.references
        return metric.statistics(outputs.texts, as_references(wanted))
    if isinstance(metric, ScoreMetric) and outputs.scored is not None:
        return metric.statistics(outputs.scored)
    if isinstance(metric, VectorMetric) and outputs.embedded is not None:
        return metric.statistics(outputs.embedded)
    raise InputError(f"{metric.name} cannot be computed from these outputs")


@dataclass(frozen=True, slots=True)
class Score:
    """A corpus score, its 95 % interval, and what must be stated beside it."""

    value: float
    low: float
    high: float
    signature: str
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All that is known about one set of outputs."""

    count: int
    scores: dict[str, Score]
    by_length: dict[str, list[Bucket]]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for `json.dumps`."""
        return asdict(self)


def evaluate(
    outputs: Sequence[str] | Outputs,
    references: References,
    source_lengths: Sequence[int] | None,
    metrics: Sequence[str],
    resamples: int = 1000,
    seed: int = 1,
) -> Evaluation:
    """Scores outputs line by line against one or several references each.

    Without source lengths (a model that reads no source) there is no quality by length.
    """
    parts = [find(name) for name in metrics]  # a misspelt name is an error before any work is done
    if not isinstance(outputs, Outputs):
        outputs = Outputs(outputs)
    lines = as_references(references)
    if outputs.texts is not None:
        _check_counts(len(outputs.texts), len(lines), len(lines) if source_lengths is None else len(source_lengths))
    count, scores, lengths = len(lines), {}, {}
    for metric in parts:
        statistics = statistics_of(metric, outputs, lines)
        count = len(statistics)
        range_ = interval(metric, statistics, resamples, seed)
        scores[metric.name] = Score(range_.value, range_.low, range_.high, metric.signature, metric.higher_is_better)
        if source_lengths is not None:
            lengths[metric.name] = by_length(metric, statistics, source_lengths, resamples=resamples, seed=seed)
    return Evaluation(count, scores, lengths)


def _check_counts(hypotheses: int, references: int, lengths: int) -> None:
    if hypotheses != references:
        raise InputError(
            f"{hypotheses} hypotheses but {references} references",
            remedy="both files need one line for each source, in the same order",
        )
    if hypotheses != lengths:
        raise InputError(f"{hypotheses} hypotheses but {lengths} sources")
    if not hypotheses:
        raise InputError("there is nothing to evaluate: no lines")
