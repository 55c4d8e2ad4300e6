"""Evaluation of system output: metrics, confidence intervals, perplexity, scores by source length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from transduce.contracts import EmbeddedCorpus, Metric, ScoredText, ScoreMetric, SourceMetric, TextMetric, VectorMetric
from transduce.errors import InputError, nearest
from transduce.evaluation.learned_metrics import BertScore, Comet
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
from transduce.evaluation.retrieval_metrics import RecallAt1, RecallAt10, ReciprocalRank, Spearman
from transduce.evaluation.significance import ConfidenceInterval, bootstrap_interval
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
    SentencePieceBleu,
    SequenceErrorRate,
    Ter,
    TokenisedBleu,
    WordErrorRate,
)
from transduce.recipe.recipe import load_user_class
from transduce.storage import atomic_path

_BUCKET_WIDTHS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000]
_MAX_EXPONENT = 700.0  # exp of a larger number overflows


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Score of the lines whose source has `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int
    interval: ConfidenceInterval


def bucket_edges(lengths: Sequence[int], max_buckets: int = 10, min_lines: int = 30) -> list[int]:
    """The last length of each of about `max_buckets` buckets: round numbers, at least `min_lines` lines in each.

    The bucket width follows from the middle 95 % of the lengths, so that an outlier does not determine it.
    """
    values = np.asarray(lengths)
    low, high = np.quantile(values, [0.025, 0.975])
    width = next((width for width in _BUCKET_WIDTHS if (high - low) / width < max_buckets - 1), _BUCKET_WIDTHS[-1])
    last = int(values.max())
    ends = list(range(width * max(1, -(-int(values.min()) // width)), last + width, width))
    edges: list[int] = []
    previous = -1
    for end in ends:
        remaining = int((values > end).sum())
        # A bucket ends when it has enough lines and either none or enough of them remain.
        inside = int(((values > previous) & (values <= end)).sum())
        if inside >= min_lines and (remaining >= min_lines or remaining == 0):
            edges.append(end)
            previous = end
    return edges if previous >= last else [*edges, last]


def by_length(
    metric: Metric,
    statistics: np.ndarray,
    lengths: Sequence[int],
    buckets: Sequence[int] | None = None,
    resamples: int = 1000,
    seed: int = 1,
) -> list[LengthBucket]:
    """Scores by source length. `buckets` are the last lengths of the buckets.

    By default they are chosen from the lengths alone, so two systems on the same lines get the same buckets.
    """
    if len(lengths) != len(statistics):
        raise InputError(f"{len(statistics)} lines were scored but {len(lengths)} source lengths given")
    if not len(lengths):
        return []
    values = np.asarray(lengths)
    edges = sorted(buckets) if buckets is not None else bucket_edges(lengths)
    if edges and edges[-1] < values.max():
        edges = [*edges, int(values.max())]  # longer lines get a bucket too
    result = []
    for before, end in pairwise([int(values.min()) - 1, *edges]):
        inside = (values > before) & (values <= end)
        if inside.any():
            score = bootstrap_interval(metric, statistics[inside], resamples, seed)
            # The outer ends are the actual lengths; the inner ones are round numbers.
            result.append(LengthBucket(before + 1, min(end, int(values.max())), int(inside.sum()), score))
    return result


def draw_by_length(series: Mapping[str, Sequence[LengthBucket]], path: str | Path, metric: str) -> None:
    """Plots the score against the source length: one curve for each system, with its confidence band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = ["#3b5bdb", "#e8590c", "#2b8a3e", "#ae3ec9", "#0c8599", "#c92a2a", "#5f3dc4", "#868e96"]
    for number, (name, line) in enumerate(series.items()):
        colour = colours[number % len(colours)]
        middles = [(bucket.low + bucket.high) / 2 for bucket in line]
        low, high = [bucket.interval.low for bucket in line], [bucket.interval.high for bucket in line]
        values = [bucket.interval.value for bucket in line]
        axes.fill_between(middles, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.vlines(middles, low, high, color=colour, alpha=0.5, linewidth=1)  # visible also with a single bucket
        style = "o-" if number < len(colours) else "s--"
        # The zero-width space: matplotlib omits names that begin with an underscore from its legend.
        axes.plot(middles, values, style, color=colour, markersize=4, linewidth=1.8, label=f"\u200b{name}")
    axes.set_xlabel("source length (tokens)")
    axes.set_ylabel(metric)
    axes.set_title("Score by source length, with 95 % intervals", loc="left", fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if series:
        for text in axes.legend(frameon=False).get_texts():
            text.set_parse_math(False)
    with atomic_path(path) as part:
        figure.savefig(part)


class Perplexity(ScoreMetric):
    """Perplexity per token: exp(- log-probability / tokens), </s> included; depends on the tokenizer."""

    name = "perplexity"
    higher_is_better = False

    def units(self, one: ScoredText) -> int:
        return one.tokens

    def statistics(self, scored: Sequence[ScoredText]) -> np.ndarray:
        rows = [[one.log_probability, self.units(one)] for one in scored]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        return math.exp(min(self._nats(totals), _MAX_EXPONENT))

    @staticmethod
    def _nats(totals: np.ndarray) -> float:
        log_probability, units = totals
        return float(-log_probability / units) if units else 0.0


class WordPerplexity(Perplexity):
    """Perplexity per word: exp(- log-probability / words), </s> included; comparable across tokenizers."""

    name = "word_perplexity"

    def units(self, one: ScoredText) -> int:
        return one.words


class CharacterPerplexity(Perplexity):
    """Perplexity per character: exp(- log-probability / characters), </s> included."""

    name = "character_perplexity"

    def units(self, one: ScoredText) -> int:
        return one.characters


class BitsPerCharacter(CharacterPerplexity):
    """Bits per character: the logarithm to base 2 of the perplexity per character."""

    name = "bits_per_character"

    def value(self, totals: np.ndarray) -> float:
        return self._nats(totals) / math.log(2)


class NatsPerCharacter(CharacterPerplexity):
    """Nats per character: the natural logarithm of the perplexity per character, the loss of a character model."""

    name = "nats_per_character"

    def value(self, totals: np.ndarray) -> float:
        return self._nats(totals)


MetricSpec = str | Mapping[str, Any]  # a name, or {kind: name, option: value}
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
    "spbleu": SentencePieceBleu,
    "caption_bleu1": CaptionBleu1,
    "caption_bleu2": CaptionBleu2,
    "caption_bleu3": CaptionBleu3,
    "caption_bleu4": CaptionBleu4,
    "cider": Cider,
    "comet": Comet,
    "bertscore": BertScore,
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


def metric_class(spec: MetricSpec) -> type[Metric]:
    """The metric of this name, or the user's for `file:Class`; the error for an unknown name suggests a similar one."""
    name = spec if isinstance(spec, str) else str(spec.get("kind"))
    if ":" in name:
        return load_user_class(Metric, name, "evaluation.metrics")
    if name not in METRICS:
        raise InputError(f"unknown metric {name!r}", where="evaluation.metrics", remedy=nearest(name, METRICS))
    return METRICS[name]


def find_metric(spec: MetricSpec) -> Metric:
    """The metric of this name, or of `{kind: name, option: value}`."""
    if isinstance(spec, str):
        return metric_class(spec)()
    from transduce.recipe import registry  # it imports METRICS

    metric: Metric = registry.factory(Metric, registry.complete(Metric, spec, "evaluation.metrics"))()
    return metric


def find_metrics(specs: Sequence[MetricSpec]) -> list[Metric]:
    """The metrics, each of them once and with all that it needs."""
    metrics = [find_metric(spec) for spec in specs]
    names = [metric.name for metric in metrics]
    for metric in metrics:
        if names.count(metric.name) > 1:
            raise InputError(f"{metric.name} is named twice", where="evaluation.metrics", remedy="evaluate two times")
        metric.check()
    return metrics


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
    token_scores: Sequence[Sequence[float]] | None = None  # log-probabilities of the tokens of each generated text
    noised: NoisedInput | None = None  # of a denoising model: its references replace those of the data
    sources: Sequence[str] | None = None  # for text metrics that read them
    warnings: dict[str, int] | None = None  # lines with each kind of warning: see explain/failures.py


def line_statistics(metric: Metric, output: SystemOutput, references: References) -> np.ndarray:
    """The statistics of each line, from the part of the output that this kind of metric needs."""
    if isinstance(metric, SourceMetric) and output.texts is not None and output.sources is not None:
        return metric.source_statistics(output.sources, output.texts, as_references(references))
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
    metrics: Sequence[MetricSpec],
    resamples: int = 1000,
    seed: int = 1,
) -> Evaluation:
    """Scores the output against one or several references for each line.

    Without source lengths (a model without a source) there are no scores by length.
    """
    selected = find_metrics(metrics)  # a misspelt name is an error before any work is done
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
