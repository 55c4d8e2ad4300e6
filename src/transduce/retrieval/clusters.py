"""Vectors enter; groups of like ones leave, found by k-means and described by their most central members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.errors import InputError

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
