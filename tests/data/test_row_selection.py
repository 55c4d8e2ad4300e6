"""Row selection: computed permutations, row subsets, lengths and corpus mixtures against plain lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.data.row_selection import (
    CorpusMixture,
    PairLengths,
    RandomPermutation,
    RowSubset,
    SeededRandom,
    chunks,
    corpus_sizes,
)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short orders too, which are lists otherwise."""
    monkeypatch.setattr("transduce.data.row_selection.CHUNK", 0)


@settings(max_examples=80)
@given(n=st.integers(1, 3000), seed=st.integers())
def test_computed_permutation_contains_every_number_once(n: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transduce.data.row_selection.CHUNK", 0)
        order = RandomPermutation(n, SeededRandom("test", seed))
    found = order[np.arange(n)]
    assert sorted(found.tolist()) == list(range(n))
    places = np.array([n - 1, 0, n // 2])
    assert order[places].tolist() == found[places].tolist()


@pytest.mark.parametrize("n", [1000, 70_000, 2**17, 2**17 + 1])
def test_computed_permutation_is_as_random_as_a_sampled_one(n: int, computed: None) -> None:
    """Neighbours are not alike, no stretch holds more of one part of the numbers, and another seed is another order."""
    order, other = (RandomPermutation(n, SeededRandom("test", seed))[np.arange(n)] for seed in (1, 2))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(order, other)[0, 1]) < 4 / n**0.5
    assert np.count_nonzero(order == other) < 12
    parts = np.histogram2d(np.arange(n), order, 10)[0]
    expected = n / 100
    assert ((parts - expected) ** 2 / expected).sum() < 200  # 81 degrees of freedom
    steps = Counter(np.diff(order).tolist())
    assert max(steps.values()) < 32  # no step of a fixed size comes again and again


def test_computed_permutation_is_uniform_per_position(computed: None) -> None:
    n, seeds = 1000, 2000
    found = np.array([RandomPermutation(n, SeededRandom("test", seed))[np.array([0, 1])] for seed in range(seeds)])
    for place in (0, 1):
        counts = np.histogram(found[:, place], 10)[0]
        assert ((counts - seeds / 10) ** 2 / (seeds / 10)).sum() < 35  # 9 degrees of freedom
    ahead = found[:, 1] > found[:, 0]
    assert 0.45 < ahead.mean() < 0.55


@given(n=st.integers(0, 60), data=st.data())
def test_row_subset_contains_all_rows_but_the_excluded(n: int, data: st.DataObject) -> None:
    without = data.draw(st.sets(st.integers(0, n - 1))) if n else set()
    rows, wanted = RowSubset(n, list(without)), [row for row in range(n) if row not in without]
    assert list(rows) == np.asarray(rows).tolist() == wanted
    assert len(rows) == len(wanted)
    assert rows[1:4].tolist() == wanted[1:4]
    assert [int(rows[place]) for place in range(len(rows))] == wanted
    parts = [part.tolist() for part in chunks(rows, 7)]
    assert [row for part in parts for row in part] == wanted
    assert all(len(part) == 7 for part in parts[:-1])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_lengths_are_differences_of_ends(pairs: list[tuple[int, int]]) -> None:
    array = np.array(pairs)
    lengths = PairLengths(*np.cumsum(array, 0).T, None)
    assert lengths[:].tolist() == array.tolist()
    assert lengths[0].tolist() == array[0].tolist()
    assert lengths[:, 1].tolist() == array[:, 1].tolist()
    rows = np.arange(len(array))[::-2]
    assert lengths[rows].tolist() == array[rows].tolist()
    assert int(lengths[len(array) - 1, 0]) == pairs[-1][0]
    assert lengths.sum() == array.sum()
    assert PairLengths(*np.cumsum(array, 0).T, array[:, 1])[:, 0].tolist() == array[:, 1].tolist()


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any),
    seed=st.integers(),
    data=st.data(),
)
def test_mixture_repeats_rows_by_weight(sizes: list[int], seed: int, data: st.DataObject) -> None:
    weights = [data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.25, 2.0, 3.5])) for _ in sizes]
    mixture = CorpusMixture(sizes, weights, SeededRandom("test", seed))
    counts = Counter(mixture[np.arange(len(mixture))].tolist())
    begin, nothing = 0, not any(int(w) * n + round((w - int(w)) * n) for w, n in zip(weights, sizes, strict=True))
    for size, weight in zip(sizes, weights, strict=True):
        weight = 1.0 if nothing else weight
        own = [counts[row] for row in range(begin, begin + size)]
        assert sum(own) == int(weight) * size + round((weight - int(weight)) * size)
        assert set(own) <= {int(weight), int(weight) + 1}
        begin += size


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_corpus_sizes_by_bisection(sizes: list[int]) -> None:
    corpus_of = np.repeat(np.arange(len(sizes)), sizes)
    assert corpus_sizes(RowSubset(len(corpus_of)), corpus_of, len(sizes)) == sizes
    some = np.arange(0, len(corpus_of), 2)
    wanted = np.bincount(corpus_of[some], minlength=len(sizes)).tolist()
    assert corpus_sizes(some, corpus_of, len(sizes)) == wanted
