"""K-means clustering of embeddings: clusters, their distinctive words, and a map in two dimensions."""

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
from transduce.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_ITERATIONS = 300  # of Lloyd's algorithm; far more than any run needs in practice


@dataclass(frozen=True)
class Clustering:
    """The cluster of each vector. Clusters are numbered by size, the largest first."""

    labels: np.ndarray  # n
    centres: np.ndarray  # k D
    cost: float  # sum of squared distances to the centres

    def nearest_members(self, vectors: np.ndarray, cluster: int, count: int) -> list[int]:
        """The rows of the members nearest to the centre of a cluster, the nearest first."""
        members = np.flatnonzero(self.labels == cluster)
        distances = _squared_distances(vectors[members], self.centres[cluster : cluster + 1])[:, 0]
        return [int(row) for row in members[np.argsort(distances, kind="stable")][:count]]


def k_means(vectors: np.ndarray, k: int, seed: int = 1, restarts: int = 10) -> Clustering:
    """k-means (Lloyd 1982) with k-means++ initialisation (Arthur & Vassilvitskii 2007); the best of several restarts.

    No cluster is empty. There must be at least k distinct vectors.
    """
    points = np.asarray(vectors, dtype=np.float64)
    distinct = len(np.unique(points, axis=0))
    if not 1 <= k <= distinct:
        raise InputError(f"{k} clusters for {distinct} distinct vectors", remedy=f"request 1 to {distinct} clusters")
    generator = np.random.default_rng(seed)
    best = min(
        (_lloyd(points, _k_means_plus_plus(points, k, generator)) for _ in range(restarts)), key=lambda one: one.cost
    )
    order = np.argsort(-np.bincount(best.labels, minlength=k), kind="stable")
    return Clustering(np.argsort(order)[best.labels], best.centres[order], best.cost)


def _squared_distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """n k: |x|^2 - 2 x.c + |c|^2, without an array of shape n k D."""
    squares = (points**2).sum(1)[:, None] - 2 * points @ centres.T + (centres**2).sum(1)
    result: np.ndarray = np.maximum(squares, 0.0)
    return result


def _k_means_plus_plus(points: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    """Initial centres: each further one is a point drawn with probability proportional to its squared distance."""
    chosen = [int(generator.integers(len(points)))]
    distances = ((points - points[chosen[0]]) ** 2).sum(1)
    for _ in range(k - 1):
        chosen.append(int(generator.choice(len(points), p=distances / distances.sum())))
        # Exact differences: the expanded form of _squared_distances would leave a small probability on chosen centres.
        distances = np.minimum(distances, ((points - points[chosen[-1]]) ** 2).sum(1))
    return points[chosen]


def _lloyd(points: np.ndarray, centres: np.ndarray) -> Clustering:
    """Alternates assignment to the nearest centre and recomputation of the centres until convergence."""
    labels = np.full(len(points), -1)
    for _ in range(_MAX_ITERATIONS):
        distances = _squared_distances(points, centres)
        nearest = distances.argmin(1)
        _refill_empty_clusters(nearest, distances, len(centres))
        if (nearest == labels).all():
            break
        labels = nearest
        centres = np.stack([points[labels == number].mean(0) for number in range(len(centres))])
    cost = float(((points - centres[labels]) ** 2).sum())
    return Clustering(labels, centres, cost)


def _refill_empty_clusters(labels: np.ndarray, distances: np.ndarray, k: int) -> None:
    """Gives each empty cluster the point farthest from its centre, taken from a cluster with several points."""
    for number in range(k):
        if not (labels == number).any():
            own_distance = distances[np.arange(len(labels)), labels]
            movable = np.bincount(labels, minlength=k)[labels] > 1
            labels[int(np.where(movable, own_distance, -1.0).argmax())] = number


def purity(labels: Sequence[int] | np.ndarray, topics: Sequence[str]) -> float:
    """The fraction of members that belong to the most frequent topic of their cluster."""
    members: dict[int, list[str]] = {}
    for label, topic in zip(labels, topics, strict=True):
        members.setdefault(int(label), []).append(topic)
    return sum(max(map(one.count, set(one))) for one in members.values()) / len(topics)


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
    """Vectors in two dimensions."""

    points: np.ndarray  # n 2
    explained_variance: float  # fraction of the variance along the two axes


def pca(vectors: np.ndarray) -> Projection:
    """Projection on the first two principal components (Pearson 1901)."""
    centred = np.asarray(vectors, dtype=np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    if centred.shape[1] == 1:
        centred = np.pad(centred, ((0, 0), (0, 1)))
    values, axes = np.linalg.eigh(centred.T @ centred)  # in ascending order
    plane = axes[:, [-1, -2]]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])  # the sign of an axis is arbitrary: fix it
    total = float(np.maximum(values, 0).sum())
    return Projection(centred @ plane, float(values[-2:].sum()) / total if total else 1.0)


def distinctive_words(lines: Sequence[str], labels: np.ndarray, cluster: int, count: int = 3) -> list[str]:
    """Words frequent in a cluster and rare elsewhere: by n log(p(word | cluster) / p(word))^2, n lines with the word.

    Without the square, function words that are slightly more frequent in the cluster would win by their counts.
    """
    words = [set(re.findall(r"\w+", line.lower())) for line in lines]
    frequency = Counter(word for line in words for word in line)
    members = np.flatnonzero(labels == cluster)
    cluster_frequency = Counter(word for row in members for word in words[row])

    def score(word: str) -> float:
        ratio = math.log(cluster_frequency[word] * len(lines) / (len(members) * frequency[word]))
        return cluster_frequency[word] * ratio * abs(ratio)

    return sorted(cluster_frequency, key=lambda word: (-score(word), word))[:count]


def draw_map(vectors: np.ndarray, lines: Sequence[str], clustering: Clustering, path: Path) -> None:
    """Draws one point per line, coloured by cluster; each cluster is labelled with its distinctive words."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    projection = pca(vectors)
    figure = Figure(figsize=(9, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    size = float(np.clip(14_000 / max(len(lines), 1), 3, 36))
    for number in range(len(clustering.centres)):
        points = projection.points[clustering.labels == number]
        axes.scatter(
            points[:, 0], points[:, 1], s=size, color=_COLOURS[number % len(_COLOURS)], alpha=0.55, linewidths=0
        )
    _write_labels(axes, projection.points, lines, clustering)
    axes.set_title(
        f"{len(lines):,} lines in {len(clustering.centres)} clusters", loc="left", fontsize=12, color=_INK, pad=10
    )
    variance = f"the first two principal components explain {projection.explained_variance:.0%} of the variance"
    axes.set_xlabel(variance, fontsize=8, color=_PALE)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.12)
    for spine in axes.spines.values():
        spine.set_visible(False)
    with atomic_path(path) as part:
        figure.savefig(part)


def _write_labels(axes: Axes, points: np.ndarray, lines: Sequence[str], clustering: Clustering) -> None:
    """Places each label at the median of its cluster; labels that would overlap are moved upwards."""
    clusters = range(len(clustering.centres))
    medians = np.array([np.median(points[clustering.labels == number], axis=0) for number in clusters])
    width, height = np.ptp(points, axis=0)
    placed: list[tuple[float, float]] = []
    for number in sorted(clusters, key=lambda number: medians[number, 1]):
        x, y = medians[number]
        for other_x, other_y in sorted(placed, key=lambda position: position[1]):
            if abs(x - other_x) < 0.3 * width and y - other_y < 0.06 * height:
                y = other_y + 0.06 * height
        placed.append((x, y))
        words = ", ".join(distinctive_words(lines, clustering.labels, number))
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        colour = _COLOURS[number % len(_COLOURS)]
        text = axes.text(x, y, f"{number + 1}  {words}", color=colour, fontsize=9.5, ha="center", va="center", bbox=box)
        text.set(fontfamily=list(fonts()), fontweight="bold", parse_math=False)
