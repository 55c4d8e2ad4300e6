"""Ranks, correlations, neighbours, groups and maps against brute force, exhaustive search and scipy."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from transduce.contracts import Embedded
from transduce.errors import InputError
from transduce.evaluation.evaluate import interval
from transduce.evaluation.retrieval_metrics import RecallAt1, RecallAt10, ReciprocalRank, Spearman, ranks
from transduce.retrieval import embeddings as vectors
from transduce.retrieval import search as neighbours
from transduce.retrieval.clustering import cluster, project, purity, telling_words
from transduce.retrieval.search import nearest


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@trials(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 999))
def test_recall_and_rank_by_brute_force(queries: int, documents: int, seed: int) -> None:
    chance = random.Random(seed)
    asked, found = drawn(seed, queries, 5), drawn(seed + 1, documents, 5)
    right = [chance.sample(range(documents), chance.randint(1, min(3, documents))) for _ in range(queries)]
    places = []
    for row, answers in enumerate(right):
        order = sorted(range(documents), key=lambda one: -cosine(asked[row], found[one]))
        places.append(1 + min(map(order.index, answers)))  # among the right ones only the first counts
    embedded = Embedded(asked, found, right)
    for metric, direct in (
        (RecallAt1(), [float(place <= 1) for place in places]),
        (RecallAt10(), [float(place <= 10) for place in places]),
        (ReciprocalRank(), [1 / place for place in places]),
    ):
        statistics = metric.statistics(embedded)
        assert statistics[:, 0] == pytest.approx(direct)
        assert metric.value(statistics.sum(0)) == pytest.approx(100 * np.mean(direct))


def test_vectors_that_are_all_alike_earn_what_guessing_earns() -> None:
    same = Embedded(np.ones((40, 3)), np.ones((40, 3)), [[row] for row in range(40)])
    for metric, chance in (
        (RecallAt1(), 1 / 40),
        (RecallAt10(), 10 / 40),
        (ReciprocalRank(), np.mean([1 / place for place in range(1, 41)])),
    ):
        assert metric.value(metric.statistics(same).sum(0)) == pytest.approx(100 * chance)


@trials(max_examples=60)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_spearman_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    said, gold = map(list, zip(*pairs, strict=True))
    assert ranks(np.array(said)) == pytest.approx(stats.rankdata(said))
    if len(set(said)) > 1 and len(set(gold)) > 1:
        metric = Spearman()
        found = metric.value(metric.statistics(said, gold).sum(0))
        assert found == pytest.approx(100 * stats.spearmanr(said, gold).statistic)


def test_spearman_of_an_order_and_of_none() -> None:
    metric = Spearman()
    rising = metric.statistics([0.1, 0.2, 0.3, 0.9], [1, 2, 4, 5])
    assert metric.value(rising.sum(0)) == pytest.approx(100)
    assert metric.value(metric.statistics([3, 2, 1], [1, 2, 3]).sum(0)) == pytest.approx(-100)
    assert metric.value(metric.statistics([1, 1, 1], [1, 2, 3]).sum(0)) == 0
    found = interval(metric, rising, 50, seed=1)
    assert found.low <= found.value <= found.high + 1e-9


@trials(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 23), st.integers(1, 30), st.integers(0, 999))
def test_nearest_by_brute_force(queries: int, documents: int, top: int, seed: int) -> None:
    asked, kept = drawn(seed, queries, 4), drawn(seed + 1, documents, 4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(neighbours, "_CHUNK", 7)  # several chunks must give what one gives
        found = nearest(asked, kept, top)
    for row, hits in enumerate(found):
        order = sorted(range(documents), key=lambda one: -cosine(asked[row], kept[one]))
        assert [hit.row for hit in hits] == order[:top]
        assert [hit.cosine for hit in hits] == pytest.approx(
            [cosine(asked[row], kept[one]) for one in order[:top]], abs=1e-5
        )


def test_of_equals_the_earlier_line_comes_first() -> None:
    (hits,) = nearest(np.ones((1, 3)), np.ones((6, 3)), 4)
    assert [hit.row for hit in hits] == [0, 1, 2, 3]


def cheapest(points: np.ndarray, k: int) -> float:
    """The least cost of any way to put the points into k groups."""
    costs = []
    for labels in itertools.product(range(k), repeat=len(points)):
        groups = [points[[label == number for label in labels]] for number in range(k)]
        costs.append(sum(((group - group.mean(0)) ** 2).sum() for group in groups if len(group)))
    return min(costs)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_clusters_by_exhaustive_search(k: int, seed: int) -> None:
    points = drawn(seed, 7, 2).astype(float)
    found = cluster(points, k, seed=seed, restarts=30)
    assert found.cost == pytest.approx(cheapest(points, k))
    sizes = np.bincount(found.labels, minlength=k)
    assert sizes.min() >= 1
    assert (np.diff(sizes) <= 0).all()  # the largest group is the first
    for number in range(k):
        assert found.centres[number] == pytest.approx(points[found.labels == number].mean(0))


def test_clusters_are_the_same_for_the_same_seed() -> None:
    points = drawn(3, 60, 6)
    assert (cluster(points, 5, seed=2).labels == cluster(points, 5, seed=2).labels).all()


def test_as_many_clusters_as_different_points() -> None:
    points = np.repeat(drawn(1, 4, 3), 5, axis=0)
    found = cluster(points, 4)
    assert found.cost == pytest.approx(0, abs=1e-9)
    assert purity(found.labels, [str(row // 5) for row in range(20)]) == 1
    with pytest.raises(InputError, match="5 clusters of 4 different"):
        cluster(points, 5)


def test_purity() -> None:
    assert purity([0, 0, 0, 1, 1], ["a", "a", "b", "b", "b"]) == pytest.approx(0.8)


def test_central_members_are_the_nearest_to_the_centre() -> None:
    points = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]])
    found = cluster(points, 2)
    assert found.central(points, 0, 2) == [1, 2]
    assert found.central(points, 1, 9) == [4]


def test_a_map_keeps_what_the_singular_values_say() -> None:
    points = drawn(5, 30, 6) * np.array([9, 5, 1, 1, 1, 1])
    flat = project(points)
    centred = points - points.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    for axis in (0, 1):
        one, other = flat.points[:, axis], left[:, axis] * sizes[axis]
        assert abs(one @ other) == pytest.approx(np.linalg.norm(one) * np.linalg.norm(other), rel=1e-4)
    assert flat.share == pytest.approx(float((sizes[:2] ** 2).sum() / (sizes**2).sum()), rel=1e-4)
    assert project(np.arange(4.0)[:, None]).points.shape == (4, 2)


def test_telling_words_are_common_here_and_rare_elsewhere() -> None:
    lines = ["the cat sleeps", "the cat eats", "the dog sleeps", "the dog barks"]
    assert telling_words(lines, np.array([0, 0, 1, 1]), 0, count=1) == ["cat"]
    assert telling_words(lines, np.array([0, 0, 1, 1]), 1, count=1) == ["dog"]


@pytest.mark.parametrize("sizes", [[], [3], [2, 5, 1]])
def test_streamed_vectors_are_read_by_numpy(sizes: list[int], tmp_path) -> None:
    blocks = [drawn(size, size, 4) for size in sizes]
    path = tmp_path / "vectors.npy"
    assert vectors.write_vectors(iter(blocks), path) == (sum(sizes), 4 if sizes else 0)
    found = np.load(path, allow_pickle=False)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.concatenate(blocks) if blocks else np.zeros((0, 0)))
    assert [one.name for one in tmp_path.iterdir()] == ["vectors.npy"]
