"""Nearest-neighbour search against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from transduce.inference.retrieval import nearest_neighbours


def random_vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@trials(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 23), st.integers(1, 30), st.integers(0, 999))
def test_nearest_neighbours_equal_brute_force(queries: int, documents: int, top: int, seed: int) -> None:
    query_vectors, kept = random_vectors(seed, queries, 4), random_vectors(seed + 1, documents, 4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transduce.inference.retrieval._CHUNK", 7)  # several chunks must give what one gives
        found = nearest_neighbours(query_vectors, kept, top)
    for row, hits in enumerate(found):
        order = sorted(range(documents), key=lambda one: -cosine(query_vectors[row], kept[one]))
        assert [hit.row for hit in hits] == order[:top]
        assert [hit.cosine for hit in hits] == pytest.approx(
            [cosine(query_vectors[row], kept[one]) for one in order[:top]], abs=1e-5
        )


def test_ties_are_won_by_the_lower_row() -> None:
    (hits,) = nearest_neighbours(np.ones((1, 3)), np.ones((6, 3)), 4)
    assert [hit.row for hit in hits] == [0, 1, 2, 3]
