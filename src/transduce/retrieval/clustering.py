"""Vectors enter; groups of like ones leave, found by k-means and described by their most central members."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from transduce.errors import InputError
from transduce.explain.png import fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROUNDS = 300  # of one descent: far more than any needs in practice


@dataclass(frozen=True)
class Clustering:
    """Which group each vector belongs to; groups are numbered from the largest down."""

    labels: np.ndarray  # n
    centres: np.ndarray  # k D
    cost: float  # sum of squared distances from the centres

    def central(self, vectors: np.ndarray, cluster: int, count: int) -> list[int]:
        """The members nearest to the centre of a group, the nearest first."""
        members = np.flatnonzero(self.labels == cluster)
        far = _distances(vectors[members], self.centres[cluster : cluster + 1])[:, 0]
        return [int(row) for row in members[np.argsort(far, kind="stable")][:count]]


def cluster(vectors: np.ndarray, k: int, seed: int = 1, restarts: int = 10) -> Clustering:
    """k-means (Lloyd 1982) from k-means++ beginnings (Arthur & Vassilvitskii 2007); the cheapest of all restarts.

    Every group has a member, as long as there are k different vectors.
    """
    points = np.asarray(vectors, dtype=np.float64)
    different = len(np.unique(points, axis=0))
    if not 1 <= k <= different:
        raise InputError(f"{k} clusters of {different} different vectors", remedy=f"ask for 1 to {different}")
    generator = np.random.default_rng(seed)
    best = min((_descend(points, _begin(points, k, generator)) for _ in range(restarts)), key=lambda one: one.cost)
    order = np.argsort(-np.bincount(best.labels, minlength=k), kind="stable")
    return Clustering(np.argsort(order)[best.labels], best.centres[order], best.cost)


def _distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """n k: |x|^2 - 2 x.c + |c|^2, which needs no n k D numbers."""
    squares = (points**2).sum(1)[:, None] - 2 * points @ centres.T + (centres**2).sum(1)
    result: np.ndarray = np.maximum(squares, 0.0)
    return result


def _begin(points: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    """k-means++: each further centre is a point drawn with probability proportional to its squared distance."""
    chosen = [int(generator.integers(len(points)))]
    far = ((points - points[chosen[0]]) ** 2).sum(1)
    for _ in range(k - 1):
        chosen.append(int(generator.choice(len(points), p=far / far.sum())))
        # The differences themselves: the short form would leave a little probability on centres chosen before.
        far = np.minimum(far, ((points - points[chosen[-1]]) ** 2).sum(1))
    return points[chosen]


def _descend(points: np.ndarray, centres: np.ndarray) -> Clustering:
    """Points to their nearest centre, centres to the mean of their points, until nothing moves."""
    labels = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        far = _distances(points, centres)
        found = far.argmin(1)
        _fill_empty(found, far, len(centres))
        if (found == labels).all():
            break
        labels = found
        centres = np.stack([points[labels == number].mean(0) for number in range(len(centres))])
    cost = float(((points - centres[labels]) ** 2).sum())
    return Clustering(labels, centres, cost)


def _fill_empty(labels: np.ndarray, far: np.ndarray, k: int) -> None:
    """A group that lost all its points takes the worst placed one of a group that can spare it."""
    for number in range(k):
        if not (labels == number).any():
            own = far[np.arange(len(labels)), labels]
            spare = np.bincount(labels, minlength=k)[labels] > 1
            labels[int(np.where(spare, own, -1.0).argmax())] = number


def purity(labels: Sequence[int] | np.ndarray, topics: Sequence[str]) -> float:
    """The share of members that belong to the commonest topic of their group."""
    groups: dict[int, list[str]] = {}
    for label, topic in zip(labels, topics, strict=True):
        groups.setdefault(int(label), []).append(topic)
    return sum(max(map(group.count, set(group))) for group in groups.values()) / len(topics)


_INK, _PALE = "#222222", "#777777"
_COLOURS = (
    "#3b5bdb",
    "#e8590c",
    "#2b8a3e",
    "#ae3ec9",
    "#0c8599",
    "#c92a2a",
    "#f08c00",
    "#5f3dc4",
    "#868e96",
    "#a61e4d",
)


@dataclass(frozen=True)
class Projection:
    """Vectors laid flat."""

    points: np.ndarray  # n 2
    share: float  # of the variance that the two axes keep


def project(vectors: np.ndarray) -> Projection:
    """Principal components (Pearson 1901): the plane in which the vectors differ most."""
    centred = np.asarray(vectors, dtype=np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    if centred.shape[1] == 1:
        centred = np.pad(centred, ((0, 0), (0, 1)))
    values, axes = np.linalg.eigh(centred.T @ centred)  # the largest come last
    plane = axes[:, [-1, -2]]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])  # an axis has no direction of its own: fix one
    total = float(np.maximum(values, 0).sum())
    return Projection(centred @ plane, float(values[-2:].sum()) / total if total else 1.0)


def telling_words(lines: Sequence[str], labels: np.ndarray, cluster: int, count: int = 3) -> list[str]:
    """Words common in a group and rare elsewhere, by n * log(p(word | group) / p(word)) ** 2 for n lines with the word.

    Squared, or a small word that is everywhere and a little commoner here would win by its number.
    """
    words = [set(re.findall(r"\w+", line.lower())) for line in lines]
    everywhere = Counter(word for line in words for word in line)
    members = np.flatnonzero(labels == cluster)
    inside = Counter(word for row in members for word in words[row])

    def tells(word: str) -> float:
        ratio = math.log(inside[word] * len(lines) / (len(members) * everywhere[word]))
        return inside[word] * ratio * abs(ratio)

    return sorted(inside, key=lambda word: (-tells(word), word))[:count]


def draw_map(vectors: np.ndarray, lines: Sequence[str], clustering: Clustering, path: Path) -> None:
    """One point a line, one colour a group, its telling words beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    flat = project(vectors)
    figure = Figure(figsize=(9, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    size = float(np.clip(14_000 / max(len(lines), 1), 3, 36))
    for number in range(len(clustering.centres)):
        points = flat.points[clustering.labels == number]
        axes.scatter(
            points[:, 0], points[:, 1], s=size, color=_COLOURS[number % len(_COLOURS)], alpha=0.55, linewidths=0
        )
    _write_labels(axes, flat.points, lines, clustering)
    axes.set_title(
        f"{len(lines):,} lines in {len(clustering.centres)} groups", loc="left", fontsize=12, color=_INK, pad=10
    )
    axes.set_xlabel(f"the two principal components keep {flat.share:.0%} of the variance", fontsize=8, color=_PALE)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.12)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path)


def _write_labels(axes: Axes, points: np.ndarray, lines: Sequence[str], clustering: Clustering) -> None:
    """At the middle of each group; where two would cover each other, they move apart up and down."""
    groups = range(len(clustering.centres))
    middles = np.array([np.median(points[clustering.labels == number], axis=0) for number in groups])
    across, height = np.ptp(points, axis=0)
    lowest: list[tuple[float, float]] = []
    for number in sorted(groups, key=lambda number: middles[number, 1]):
        x, y = middles[number]
        for other_x, other_y in sorted(lowest, key=lambda place: place[1]):
            if abs(x - other_x) < 0.3 * across and y - other_y < 0.06 * height:
                y = other_y + 0.06 * height
        lowest.append((x, y))
        words = ", ".join(telling_words(lines, clustering.labels, number))
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        colour = _COLOURS[number % len(_COLOURS)]
        said = axes.text(x, y, f"{number + 1}  {words}", color=colour, fontsize=9.5, ha="center", va="center", bbox=box)
        said.set(fontfamily=list(fonts()), fontweight="bold", parse_math=False)
