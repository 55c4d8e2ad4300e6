"""Hypotheses and references enter; scores with intervals and quality by source length leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transduce.errors import InputError
from transduce.evaluation.lengths import Bucket, by_length, draw_by_length
from transduce.evaluation.metrics import METRICS, References, as_references, find
from transduce.evaluation.significance import Interval, Paired, interval, paired, randomised, verdict

__all__ = [
    "METRICS",
    "Bucket",
    "Evaluation",
    "Interval",
    "Paired",
    "Score",
    "by_length",
    "draw_by_length",
    "evaluate",
    "find",
    "interval",
    "paired",
    "randomised",
    "verdict",
]


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
    hypotheses: Sequence[str],
    references: References,
    source_lengths: Sequence[int],
    metrics: Sequence[str],
    resamples: int = 1000,
    seed: int = 1,
) -> Evaluation:
    """Scores outputs line by line against one or several references each."""
    parts = [find(name) for name in metrics]  # a misspelt name is an error before any work is done
    lines = as_references(references)
    _check_counts(len(hypotheses), len(lines), len(source_lengths))
    scores, lengths = {}, {}
    for metric in parts:
        statistics = metric.statistics(hypotheses, lines)
        range_ = interval(metric, statistics, resamples, seed)
        scores[metric.name] = Score(range_.value, range_.low, range_.high, metric.signature, metric.higher_is_better)
        lengths[metric.name] = by_length(metric, statistics, source_lengths, resamples=resamples, seed=seed)
    return Evaluation(len(hypotheses), scores, lengths)


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
