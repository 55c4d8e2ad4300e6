"""Statistics and source lengths enter; quality by length leaves, as buckets with intervals and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from transduce.contracts import Metric
from transduce.errors import InputError
from transduce.evaluation.significance import Interval, interval

_STEPS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The lines whose source has `low` to `high` tokens, both included, and how well they went."""

    low: int
    high: int
    count: int
    interval: Interval


def readable_edges(lengths: Sequence[int], most: int = 10, fewest: int = 30) -> list[int]:
    """The last length of each of about `most` buckets: round numbers, at least `fewest` lines in each.

    The step is chosen from the middle 95 % of the lengths, so that one giant line does not swallow all others.
    """
    values = np.asarray(lengths)
    low, high = np.quantile(values, [0.025, 0.975])
    step = next((step for step in _STEPS if (high - low) / step < most - 1), _STEPS[-1])
    last = int(values.max())
    ends = list(range(step * max(1, -(-int(values.min()) // step)), last + step, step))
    edges: list[int] = []
    previous = -1
    for end in ends:
        left = int((values > end).sum())
        # A bucket closes when it is full and leaves either nothing or enough for another one.
        if int(((values > previous) & (values <= end)).sum()) >= fewest and (left >= fewest or left == 0):
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
) -> list[Bucket]:
    """Quality for each range of source lengths. `buckets` gives the last length of each; left out, they are chosen
    from the lengths alone, so two systems on the same lines get the same ones."""
    if len(lengths) != len(statistics):
        raise InputError(f"{len(statistics)} lines were scored but {len(lengths)} source lengths given")
    if not len(lengths):
        return []
    values = np.asarray(lengths)
    edges = sorted(buckets) if buckets is not None else readable_edges(lengths)
    if edges and edges[-1] < values.max():
        edges = [*edges, int(values.max())]  # nothing is left out of the picture in silence
    result = []
    for before, end in pairwise([int(values.min()) - 1, *edges]):
        inside = (values > before) & (values <= end)
        if inside.any():
            score = interval(metric, statistics[inside], resamples, seed)
            # The outer ends say what was there; the inner ones stay at the round numbers.
            result.append(Bucket(before + 1, min(end, int(values.max())), int(inside.sum()), score))
    return result


def draw_by_length(series: Mapping[str, Sequence[Bucket]], path: str | Path, metric: str) -> None:
    """A picture of quality against source length: one line for each system, its interval as a band."""
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
        axes.vlines(middles, low, high, color=colour, alpha=0.5, linewidth=1)  # also seen where there is one bucket
        style = "o-" if number < len(colours) else "s--"
        # A name that begins with an underscore would be left out of matplotlib's legend.
        axes.plot(middles, values, style, color=colour, markersize=4, linewidth=1.8, label=f"\u200b{name}")
    axes.set_xlabel("source length (tokens)")
    axes.set_ylabel(metric)
    axes.set_title("Quality by source length, with 95 % intervals", loc="left", fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if series:
        for text in axes.legend(frameon=False).get_texts():
            text.set_parse_math(False)
    figure.savefig(path)
