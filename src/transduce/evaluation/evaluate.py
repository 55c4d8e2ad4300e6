"""Evaluation of system output: metrics, confidence intervals, scores by source length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from transduce.contracts import EmbeddedCorpus, Metric, ScoredText, ScoreMetric, TextMetric, VectorMetric
from transduce.errors import InputError, nearest
from transduce.evaluation.by_length import LengthBucket, by_length
from transduce.evaluation.overlap_metrics import (
    Cider,
    MacroF1,
    References,
    Rouge1,
    Rouge2,
    RougeL,
    SpanF1,
    TokenF1,
    as_references,
)
from transduce.evaluation.perplexity import (
    BitsPerCharacter,
    CharacterPerplexity,
    NatsPerCharacter,
    Perplexity,
    WordPerplexity,
)
from transduce.evaluation.retrieval_metrics import RecallAt1, RecallAt10, ReciprocalRank, Spearman
from transduce.evaluation.significance import bootstrap_interval
from transduce.evaluation.text_metrics import (
    Accuracy,
    Bleu,
    Bleu1,
    Bleu2,
    Bleu3,
    CaptionBleu1,
    CaptionBleu2,
    CaptionBleu3,
    CaptionBleu4,
    CharacterErrorRate,
    ChrF,
    ChrFPlusPlus,
    ExactMatch,
    PhoneErrorRate,
    SequenceErrorRate,
    Ter,
    TokenisedBleu,
    WordErrorRate,
)
from transduce.recipe.user_code import load_user_class

METRICS: dict[str, type[Metric]] = {
    "exact": ExactMatch,
    "accuracy": Accuracy,
    "macro_f1": MacroF1,
    "span_f1": SpanF1,
    "token_f1": TokenF1,
    "rouge1": Rouge1,
    "rouge2": Rouge2,
    "rougeL": RougeL,
    "bleu": Bleu,
    "bleu1": Bleu1,
    "bleu2": Bleu2,
    "bleu3": Bleu3,
    "bleu_tokenised": TokenisedBleu,
    "caption_bleu1": CaptionBleu1,
    "caption_bleu2": CaptionBleu2,
    "caption_bleu3": CaptionBleu3,
    "caption_bleu4": CaptionBleu4,
    "cider": Cider,
    "chrf": ChrF,
    "chrf++": ChrFPlusPlus,
    "ter": Ter,
    "ser": SequenceErrorRate,
    "wer": WordErrorRate,
    "cer": CharacterErrorRate,
    "per": PhoneErrorRate,
    "perplexity": Perplexity,
    "word_perplexity": WordPerplexity,
    "character_perplexity": CharacterPerplexity,
    "bits_per_character": BitsPerCharacter,
    "nats_per_character": NatsPerCharacter,
    "recall@1": RecallAt1,
    "recall@10": RecallAt10,
    "mrr": ReciprocalRank,
    "spearman": Spearman,
}


def metric_class(name: str) -> type[Metric]:
    """The metric of this name, or the user's for `file:Class`; the error for an unknown name suggests a similar one."""
    if ":" in name:
        return load_user_class(Metric, name, "evaluation.metrics")
    if name not in METRICS:
        raise InputError(f"unknown metric {name!r}", remedy=nearest(name, METRICS))
    return METRICS[name]


def find_metric(name: str) -> Metric:
    """An instance of the metric of this name."""
    return metric_class(name)()


@dataclass(frozen=True)
class NoisedInput:
    """The input of a denoising model: noised sources, and the texts or tokens to restore."""

    sources: Sequence[str]
    references: Sequence[Sequence[str]]


@dataclass(frozen=True)
class SystemOutput:
    """The output of a model for held-out data, as far as the metrics need it."""

    texts: Sequence[str] | None = None  # for text metrics
    scored: Sequence[ScoredText] | None = None  # for metrics of probabilities
    embedded: EmbeddedCorpus | None = None  # for metrics of embeddings
    noised: NoisedInput | None = None  # of a denoising model: its references replace those of the data


def line_statistics(metric: Metric, output: SystemOutput, references: References) -> np.ndarray:
    """The statistics of each line, from the part of the output that this kind of metric needs."""
    if isinstance(metric, TextMetric) and output.texts is not None:
        return metric.statistics(output.texts, as_references(output.noised.references if output.noised else references))
    if isinstance(metric, ScoreMetric) and output.scored is not None:
        return metric.statistics(output.scored)
    if isinstance(metric, VectorMetric) and output.embedded is not None:
        return metric.statistics(output.embedded)
    raise InputError(f"{metric.name} cannot be computed from these outputs")


@dataclass(frozen=True, slots=True)
class MetricScore:
    """A corpus score, its 95 % confidence interval, and the signature to report with it."""

    value: float
    low: float
    high: float
    signature: str
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All scores of one system output."""

    count: int
    scores: dict[str, MetricScore]
    by_length: dict[str, list[LengthBucket]]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers for `json.dumps`."""
        return asdict(self)


def evaluate(
    output: Sequence[str] | SystemOutput,
    references: References,
    source_lengths: Sequence[int] | None,
    metrics: Sequence[str],
    resamples: int = 1000,
    seed: int = 1,
) -> Evaluation:
    """Scores the output against one or several references for each line.

    Without source lengths (a model without a source) there are no scores by length.
    """
    selected = [find_metric(name) for name in metrics]  # a misspelt name is an error before any work is done
    if not isinstance(output, SystemOutput):
        output = SystemOutput(output)
    lines = as_references(references)
    if output.texts is not None:
        _check_counts(len(output.texts), len(lines), len(lines) if source_lengths is None else len(source_lengths))
    count, scores, lengths = len(lines), {}, {}
    for metric in selected:
        statistics = line_statistics(metric, output, lines)
        count = len(statistics)
        interval = bootstrap_interval(metric, statistics, resamples, seed)
        scores[metric.name] = MetricScore(
            interval.value, interval.low, interval.high, metric.signature, metric.higher_is_better
        )
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
        raise InputError("there are no lines to evaluate")
