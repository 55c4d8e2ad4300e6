"""Scores by source length: buckets with confidence intervals, and their plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from transduce.contracts import Metric
from transduce.errors import InputError
from transduce.evaluation.significance import ConfidenceInterval, bootstrap_interval
from transduce.storage import atomic_path

_BUCKET_WIDTHS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000]


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
