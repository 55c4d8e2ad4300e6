"""Batches: every pair once per epoch, within the budget, little padding, deterministic."""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.data.batching import Batches, DataPosition, EpochPlan, batch_by_length, batch_starts, collate, gather
from transduce.data.filters import Filters
from transduce.data.row_selection import RowSubset, SeededRandom
from transduce.data.store import Store, build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import BOS, EOS, PAD
from transduce.recipe import Corpus, CurriculumRecipe

SPECIAL = np.array([1, 2])  # </s> of the source; <s> and </s> of the target


def _lengths_only(lengths: np.ndarray) -> Any:
    """What planning asks of a store."""
    facts = {"lengths": lengths.astype(np.int32), "corpus_of": np.zeros(len(lengths), np.uint8)}
    return SimpleNamespace(items=None, **facts, sourceless=False)


def _natural(n: int, seed: int = 0) -> np.ndarray:
    """Sentences of about 25 tokens; targets about as long, a quarter more or less."""
    draw = np.random.default_rng(seed)
    source = np.exp(draw.normal(np.log(25), 0.6, n)).round().clip(1)
    return np.stack([source, (source * np.exp(draw.normal(0, 0.25, n))).round().clip(1)], 1)


def _rows(plan: EpochPlan) -> np.ndarray:
    """All rows of an epoch, in its order."""
    return np.concatenate([plan.batch(index).rows for index in range(len(plan))])


def _batches(lengths: np.ndarray, **changes: Any) -> Batches:
    options = {"batch_tokens": 4096, "bucket_batches": 100, "seed": 1, **changes}
    return Batches(_lengths_only(lengths), np.arange(len(lengths)), **options)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=150),
    budget=st.integers(1, 400),
    bucket_batches=st.integers(1, 5),
    seed=st.integers(-9, 2**65),
    epoch=st.integers(0, 5),
)
def test_every_pair_occurs_once_within_the_budget(
    lengths: list[tuple[int, int]], budget: int, bucket_batches: int, seed: int, epoch: int
) -> None:
    array = np.array(lengths)
    plan = _batches(array, batch_tokens=budget, bucket_batches=bucket_batches, seed=seed).plan(epoch)
    found = [plan.batch(index).rows for index in range(len(plan))]
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    slots = [len(rows) * int((array[rows].max(0) + SPECIAL).sum()) for rows in found]
    assert all(slot <= budget or len(rows) == 1 for slot, rows in zip(slots, found, strict=True))
    assert plan.padding == pytest.approx(1 - (array + SPECIAL).sum() / sum(slots))
    again = _batches(array, batch_tokens=budget, bucket_batches=bucket_batches, seed=seed).plan(epoch)
    backwards = [again.batch(index).rows for index in reversed(range(len(again)))]
    assert [rows.tolist() for rows in found] == [rows.tolist() for rows in reversed(backwards)]
    with pytest.raises(IndexError):
        plan.batch(len(plan))


def test_padding_is_low_on_natural_lengths() -> None:
    for budget in (1024, 4096):
        assert _batches(_natural(20_000), batch_tokens=budget).padding(0) < 0.10


def test_batches_are_full_and_shuffled() -> None:
    lengths = _natural(20_000)
    plan = _batches(lengths).plan(0)
    assert len(plan) < 1.15 * (lengths + SPECIAL).sum() / 4096
    longest = [lengths[plan.batch(index).rows].max() for index in range(len(plan))]
    neighbours = np.corrcoef(longest[:-1], longest[1:])[0, 1]
    assert abs(neighbours) < 0.2


def test_epochs_and_seeds_differ() -> None:
    lengths = _natural(500)
    plans = [_batches(lengths, seed=seed).plan(epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(_rows(plan).tolist()) for plan in plans}) == 4
    found = [{tuple(sorted(plan.batch(index).rows.tolist())) for index in range(len(plan))} for plan in plans]
    assert len(found[0] & found[1]) < len(found[0]) / 2  # even though all fits into one bucket_batches


@given(n=st.integers(0, 200), seed=st.integers())
def test_permutation_contains_every_number_once(n: int, seed: int) -> None:
    drawn = SeededRandom("test", seed).permutation(n)
    assert sorted(drawn.tolist()) == list(range(n))
    assert drawn.tolist() == SeededRandom("test", seed).permutation(n).tolist()


def test_permutation_positions_are_uniform() -> None:
    first = Counter(int(SeededRandom("test", seed).permutation(5)[0]) for seed in range(2000))
    assert all(330 < first[place] < 470 for place in range(5))


def test_positions_visit_every_batch_and_can_be_sought() -> None:
    batches = _batches(_natural(300), batch_tokens=1000)
    position, visited = DataPosition(), []
    for _ in range(batches.batches_in(0) + 2):
        visited.append(position)
        position = batches.after(position)
    assert visited[-1] == DataPosition(1, 1)
    assert [place.index for place in visited[:-2]] == list(range(batches.batches_in(0)))
    assert DataPosition.from_json(position.to_json()) == position


def test_weights_set_how_often_a_corpus_occurs() -> None:
    store = _lengths_only(_natural(4000))
    store.corpus_of = np.repeat([0, 1, 2, 3], 1000).astype(np.uint8)
    options: dict[str, Any] = {"batch_tokens": 4096, "bucket_batches": 100, "seed": 1}
    batches = Batches(store, np.arange(4000), weights=(1.0, 2.0, 0.5, 1.25), **options)
    counts = [Counter(_rows(batches.plan(epoch)).tolist()) for epoch in (0, 1)]
    for count in counts:
        assert [sum(count[row] for row in range(c * 1000, c * 1000 + 1000)) for c in range(4)] == [
            1000,
            2000,
            500,
            1250,
        ]
        assert all(count[row] == 1 for row in range(1000))
        assert all(count[row] == 2 for row in range(1000, 2000))
    halves = [{row for row in range(2000, 3000) if count[row]} for count in counts]
    assert 150 < len(halves[0] & halves[1]) < 350  # another half each epoch
    with pytest.raises(InputError, match="2 mixing weights for 4"):
        Batches(store, np.arange(4000), weights=(1.0, 2.0), **options).plan(0)
    alone = Batches(store, np.array([2000]), weights=(1.0, 1.0, 0.1, 1.0), **options)
    assert alone.batches_in(0) == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Tokenizer]:
    folder = tmp_path_factory.mktemp("batching")
    draw = np.random.default_rng(3)
    words = ["haus", "hausboot", "boot", "wasser", "wasserfall", "fall"]
    pairs = [" ".join(draw.choice(words, draw.integers(1, 12))) for _ in range(200)]
    (folder / "a.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in pairs))
    tokenizer = Tokenizer.train(pairs, "bpe", 320)
    corpus = Corpus(path=str(folder / "a.tsv"))
    return build_store([corpus], tokenizer, tokenizer, Filters(), "error", folder / "s"), tokenizer


def test_batch_contains_the_rows_it_names(built: tuple[Store, Tokenizer]) -> None:
    store, _ = built
    indices = np.arange(0, len(store), 3)
    batches = Batches(store, indices, batch_tokens=500, bucket_batches=4, seed=7)
    seen: list[int] = []
    for index in range(batches.batches_in(0)):
        batch = batches.at(DataPosition(0, index))
        assert batch.source is not None
        assert batch.target is not None
        assert batch.source.values.dtype == torch.long
        assert batch.slots <= 500
        for place, row in enumerate(batch.rows):
            source, target = store.ids(row)
            assert batch.source.values[place][batch.source.mask[place]].tolist() == [*source, EOS]
            assert batch.target.values[place][batch.target.mask[place]].tolist() == [BOS, *target, EOS]
        for part in (batch.source, batch.target):
            assert (part.values[~part.mask] == PAD).all()
            assert part.mask.any(0).all()  # no column is padding alone
            assert (part.mask.int().diff(dim=1) <= 0).all()  # padding on the right
        seen += batch.rows
    assert sorted(seen) == indices.tolist()


def test_collate_equals_gather(built: tuple[Store, Tokenizer]) -> None:
    store, _ = built
    rows = [5, 3, 17, 3]
    one, other = gather(store, rows), collate([store.ids(row) for row in rows], rows)
    for a, b in ((one.source, other.source), (one.target, other.target)):
        assert a is not None
        assert b is not None
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.mask, b.mask)
    assert one.rows == other.rows == tuple(rows)
    sources = collate([([7, 8], None), ([], None)], [0, 1])
    assert sources.target is None
    assert sources.source is not None
    assert sources.source.values.tolist() == [[7, 8, EOS], [EOS, PAD, PAD]]
    assert collate([([], [])], [0]).slots == 3
    with pytest.raises(ValueError, match="some"):
        collate([([7], [8]), ([7], None)], [0, 1])


def test_bpe_dropout_is_deterministic_per_epoch_and_row(built: tuple[Store, Tokenizer]) -> None:
    store, tokenizer = built
    options: dict[str, Any] = {
        "batch_tokens": 500,
        "bucket_batches": 4,
        "seed": 7,
        "tokenizers": (tokenizer, tokenizer),
    }
    noisy = Batches(store, np.arange(len(store)), dropout=(0.3, 0.0), **options)
    plain = Batches(store, np.arange(len(store)), **options)
    again = Batches(store, np.arange(len(store)), dropout=(0.3, 0.0), **options)
    spellings = set()
    for position in (DataPosition(0, 3), DataPosition(0, 0), DataPosition(1, 0), DataPosition(2, 0)):
        batch, other, clean = noisy.at(position), again.at(position), plain.at(position)
        assert batch.source is not None
        assert other.source is not None
        assert clean.source is not None
        assert batch.target is not None
        assert clean.target is not None
        assert torch.equal(batch.source.values, other.source.values)
        assert torch.equal(batch.target.values, clean.target.values)
        assert int(batch.source.mask.sum()) > int(clean.source.mask.sum())
        for place, row in enumerate(batch.rows):
            assert tokenizer.decode(batch.source.values[place].tolist()) == store.example(row).source
    for epoch in range(4):
        rows = {
            row: index
            for index in range(noisy.batches_in(epoch))
            for row in noisy.plan(epoch).batch(index).rows.tolist()
        }
        batch = noisy.at(DataPosition(epoch, rows[11]))
        assert batch.source is not None
        spellings.add(tuple(batch.source.values[batch.rows.index(11)].tolist()))
    assert len(spellings) > 1
    with pytest.raises(ValueError, match="tokenizers"):
        Batches(store, np.arange(3), batch_tokens=9, bucket_batches=1, seed=1, dropout=(0.1, 0.0))


def test_empty_data_is_an_error() -> None:
    with pytest.raises(InputError, match="no pairs"):
        _batches(np.zeros((0, 2)))


@given(lengths=st.lists(st.integers(0, 50), max_size=100), budget=st.integers(1, 200))
def test_batch_by_length_covers_all_rows_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = batch_by_length(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(len(group) * max(lengths[row] for row in group) <= budget or len(group) == 1 for group in groups)
    flat = [lengths[row] for group in groups for row in group]
    assert flat == sorted(flat, reverse=True)


@given(
    widths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=300),
    budget=st.integers(1, 3000),
)
def test_batch_starts_equal_a_plain_loop(widths: list[tuple[int, int]], budget: int) -> None:
    starts, count, widest = [0], 0, (0, 0)
    for row, (source, target) in enumerate(widths):
        wider = max(widest[0], source), max(widest[1], target)
        if count and (count + 1) * sum(wider) > budget:
            starts.append(row)
            count, wider = 0, (source, target)
        count, widest = count + 1, wider
    assert batch_starts(np.array(widths), budget).tolist() == starts


def test_planning_has_no_loop_over_pairs() -> None:
    """Lines of Python that a plan takes are fewer than its pairs."""
    batches, executed = _batches(_natural(200_000)), Counter[str]()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        executed[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        count = batches.batches_in(0)
    finally:
        sys.settrace(before)
    assert count > 2000
    assert executed["line"] < 100_000


class _Computed:
    """Lengths that are kept nowhere."""

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return np.stack((rows * 7 % 23, rows * 11 % 19), 1).astype(np.int32)


@pytest.mark.parametrize("weights", [None, (1.5,)])
def test_planning_memory_does_not_grow_with_the_data(weights: tuple[float, ...] | None) -> None:
    peaks = []
    for n in (140_000, 280_000):
        facts = {"lengths": _Computed(), "corpus_of": np.broadcast_to(np.uint8(0), n)}
        store: Any = SimpleNamespace(items=None, **facts, sourceless=False)
        tracemalloc.start()
        batches = Batches(store, RowSubset(n, [5, 9]), batch_tokens=8192, bucket_batches=3, seed=1, weights=weights)
        assert batches.batches_in(0) > 300
        assert batches.plan(0).batch(batches.batches_in(0) - 1).rows.max() < n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("weights", [None, (1.0, 2.0)])
def test_a_curriculum_uses_the_pairs_with_the_highest_scores_first(tmp_path: Path, weights: Any) -> None:
    """Epoch e of T has the share sqrt(s^2 + (1 - s^2) e / T); after T epochs it has all pairs."""
    draw, scores, corpora = np.random.default_rng(3), [], []
    for name in "ab":
        own = draw.permutation(100)[:50] / 7
        (tmp_path / name).write_text("".join(f"w{number}\tw\t{score}\n" for number, score in enumerate(own)))
        corpora.append(Corpus(path=str(tmp_path / name), columns=("1", "2")))
        scores += own.astype(np.float32).tolist()
    words = Tokenizer.train([f"w{number}" for number in range(50)] + ["w"], "words", 100)
    store = build_store(corpora, words, words, Filters(), "error", tmp_path / "cache")
    curriculum = CurriculumRecipe(column="column3", epochs=3, start=0.2)
    options = {"batch_tokens": 40, "bucket_batches": 2, "seed": 1, "weights": weights}
    batches = Batches(store, RowSubset(len(store)), **options, curriculum=curriculum)
    for epoch, share in enumerate([0.2, 0.6, math.sqrt(0.04 + 0.96 * 2 / 3), 1.0, 1.0]):
        rows = [
            row for index in range(batches.batches_in(epoch)) for row in batches.at(DataPosition(epoch, index)).rows
        ]
        best = sorted(range(100), key=lambda row: -scores[row])[: math.ceil(share * 100)]
        assert {*rows} == {*best}
        expected = Counter(2 if weights is not None and row >= 50 else 1 for row in best)
        assert Counter(Counter(rows).values()) == expected
    plain = Batches(store, RowSubset(len(store)), **options)
    assert plain.at(DataPosition(4, 0)).rows == batches.at(DataPosition(4, 0)).rows
    missing = Batches(store, RowSubset(len(store)), **options, curriculum=CurriculumRecipe(column="score"))
    with pytest.raises(InputError, match="no column 'score'") as caught:
        missing.at(DataPosition())
    assert caught.value.where == f"{tmp_path / 'a'}:1"
