"""K-means against exhaustive search, PCA against the singular value decomposition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from transduce.errors import InputError
from transduce.inference.retrieval import distinctive_words, k_means, pca, purity


def random_vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def optimal_cost(points: np.ndarray, k: int) -> float:
    """The least cost of any way to put the points into k groups."""
    costs = []
    for labels in itertools.product(range(k), repeat=len(points)):
        groups = [points[[label == number for label in labels]] for number in range(k)]
        costs.append(sum(((group - group.mean(0)) ** 2).sum() for group in groups if len(group)))
    return min(costs)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_means_finds_the_optimum_of_exhaustive_search(k: int, seed: int) -> None:
    points = random_vectors(seed, 7, 2).astype(float)
    found = k_means(points, k, seed=seed, restarts=30)
    assert found.cost == pytest.approx(optimal_cost(points, k))
    sizes = np.bincount(found.labels, minlength=k)
    assert sizes.min() >= 1
    assert (np.diff(sizes) <= 0).all()  # the largest group is the first
    for number in range(k):
        assert found.centres[number] == pytest.approx(points[found.labels == number].mean(0))


def test_k_means_is_reproducible_by_seed() -> None:
    points = random_vectors(3, 60, 6)
    assert (k_means(points, 5, seed=2).labels == k_means(points, 5, seed=2).labels).all()


def test_k_means_with_one_cluster_per_distinct_point() -> None:
    points = np.repeat(random_vectors(1, 4, 3), 5, axis=0)
    found = k_means(points, 4)
    assert found.cost == pytest.approx(0, abs=1e-9)
    assert purity(found.labels, [str(row // 5) for row in range(20)]) == 1
    with pytest.raises(InputError, match="5 clusters for 4 distinct"):
        k_means(points, 5)


def test_purity_counts_the_most_frequent_topic() -> None:
    assert purity([0, 0, 0, 1, 1], ["a", "a", "b", "b", "b"]) == pytest.approx(0.8)


def test_nearest_members_are_sorted_by_distance_to_the_centre() -> None:
    points = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]])
    found = k_means(points, 2)
    assert found.nearest_members(points, 0, 2) == [1, 2]
    assert found.nearest_members(points, 1, 9) == [4]


def test_pca_equals_the_singular_value_decomposition() -> None:
    points = random_vectors(5, 30, 6) * np.array([9, 5, 1, 1, 1, 1])
    projection = pca(points)
    centred = points - points.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    for axis in (0, 1):
        one, other = projection.points[:, axis], left[:, axis] * sizes[axis]
        assert abs(one @ other) == pytest.approx(np.linalg.norm(one) * np.linalg.norm(other), rel=1e-4)
    assert projection.explained_variance == pytest.approx(float((sizes[:2] ** 2).sum() / (sizes**2).sum()), rel=1e-4)
    assert pca(np.arange(4.0)[:, None]).points.shape == (4, 2)


def test_distinctive_words_are_frequent_in_the_cluster_only() -> None:
    lines = ["the cat sleeps", "the cat eats", "the dog sleeps", "the dog barks"]
    assert distinctive_words(lines, np.array([0, 0, 1, 1]), 0, count=1) == ["cat"]
    assert distinctive_words(lines, np.array([0, 0, 1, 1]), 1, count=1) == ["dog"]
