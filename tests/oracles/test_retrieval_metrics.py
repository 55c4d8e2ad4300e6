"""Retrieval metrics against brute force, rank correlation against scipy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from transduce.contracts import EmbeddedCorpus
from transduce.evaluation.retrieval_metrics import RecallAt1, RecallAt10, ReciprocalRank, Spearman, ranks
from transduce.evaluation.significance import bootstrap_interval


def random_vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@trials(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 999))
def test_recall_and_reciprocal_rank_equal_brute_force(queries: int, documents: int, seed: int) -> None:
    chance = random.Random(seed)
    query_vectors, found = random_vectors(seed, queries, 5), random_vectors(seed + 1, documents, 5)
    right = [chance.sample(range(documents), chance.randint(1, min(3, documents))) for _ in range(queries)]
    places = []
    for row, answers in enumerate(right):
        order = sorted(range(documents), key=lambda one: -cosine(query_vectors[row], found[one]))
        places.append(1 + min(map(order.index, answers)))  # among the right ones only the first counts
    embedded = EmbeddedCorpus(query_vectors, found, right)
    for metric, direct in (
        (RecallAt1(), [float(place <= 1) for place in places]),
        (RecallAt10(), [float(place <= 10) for place in places]),
        (ReciprocalRank(), [1 / place for place in places]),
    ):
        statistics = metric.statistics(embedded)
        assert statistics[:, 0] == pytest.approx(direct)
        assert metric.value(statistics.sum(0)) == pytest.approx(100 * np.mean(direct))


def test_identical_vectors_score_at_chance_level() -> None:
    same = EmbeddedCorpus(np.ones((40, 3)), np.ones((40, 3)), [[row] for row in range(40)])
    for metric, chance in (
        (RecallAt1(), 1 / 40),
        (RecallAt10(), 10 / 40),
        (ReciprocalRank(), np.mean([1 / place for place in range(1, 41)])),
    ):
        assert metric.value(metric.statistics(same).sum(0)) == pytest.approx(100 * chance)


@trials(max_examples=60)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_spearman_equals_scipy(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    scores, gold = map(list, zip(*pairs, strict=True))
    assert ranks(np.array(scores)) == pytest.approx(stats.rankdata(scores))
    if len(set(scores)) > 1 and len(set(gold)) > 1:
        metric = Spearman()
        found = metric.value(metric.pair_statistics(scores, gold).sum(0))
        assert found == pytest.approx(100 * stats.spearmanr(scores, gold).statistic)


def test_spearman_of_monotonic_and_constant_scores() -> None:
    metric = Spearman()
    rising = metric.pair_statistics([0.1, 0.2, 0.3, 0.9], [1, 2, 4, 5])
    assert metric.value(rising.sum(0)) == pytest.approx(100)
    assert metric.value(metric.pair_statistics([3, 2, 1], [1, 2, 3]).sum(0)) == pytest.approx(-100)
    assert metric.value(metric.pair_statistics([1, 1, 1], [1, 2, 3]).sum(0)) == 0
    found = bootstrap_interval(metric, rising, 50, seed=1)
    assert found.low <= found.value <= found.high + 1e-9
