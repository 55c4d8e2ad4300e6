"""Packed batches: every pair once, capacity, one shape, little padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batching import _batches, _natural

from transduce.data.batching import ROW_LENGTH, Batches, DataPosition, Packing, assign_bins, gather, packed_lengths
from transduce.data.filters import Filters
from transduce.data.store import build_store
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import BOS, EOS, Batch
from transduce.kernels.attention import MAX_LENGTH
from transduce.recipe import Corpus

ROOM = np.array([24, 32])


def test_row_length_is_supported_by_the_kernels() -> None:
    assert ROW_LENGTH == MAX_LENGTH


@settings(max_examples=80)
@given(lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(2, 33)), min_size=1, max_size=120))
def test_bins_never_exceed_their_capacity(lengths: list[tuple[int, int]]) -> None:
    widths = np.array(lengths)
    lines = assign_bins(widths, ROOM)
    filled = np.zeros((lines.max() + 1, 2), np.int64)
    np.add.at(filled, lines, packed_lengths(widths))
    assert (filled <= ROOM).all()
    assert (filled.sum(1) > 0).all()  # no row for nothing


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=150),
    rows=st.integers(1, 6),
    bucket_batches=st.integers(1, 5),
    epoch=st.integers(0, 5),
)
def test_every_pair_occurs_once_packed_or_padded(
    lengths: list[tuple[int, int]], rows: int, bucket_batches: int, epoch: int
) -> None:
    array, packing = np.array(lengths), Packing(rows, *ROOM.tolist())
    plans = [
        _batches(array, batch_tokens=packing.slots, bucket_batches=bucket_batches, packing=packing).plan(epoch)
        for _ in range(2)
    ]
    found = [plans[0].batch(index) for index in range(len(plans[0]))]
    assert sorted(np.concatenate([one.rows for one in found]).tolist()) == list(range(len(lengths)))
    for one in found:
        fits = packing.fits(array[one.rows] + np.array([1, 2]))
        if one.bins is None:
            assert not fits.any()
            continue
        assert fits.all()
        assert (np.diff(one.bins) >= 0).all()
        filled = np.zeros((rows, 2), np.int64)
        np.add.at(filled, one.bins, array[one.rows] + 1)
        assert (filled <= ROOM).all()
    again = [plans[1].batch(index) for index in reversed(range(len(plans[1])))]
    assert [one.rows.tolist() for one in found] == [one.rows.tolist() for one in reversed(again)]


def test_packing_has_little_padding_and_mixes_lengths() -> None:
    lengths = _natural(40_000)
    packing = Packing.for_budget(32_768, lengths + 1)
    assert packing is not None
    batches = _batches(lengths, batch_tokens=32_768, packing=packing)
    assert batches.padding(0) < 0.08
    planned = [batches.plan(0).batch(index) for index in range(30)]
    means = [lengths[one.rows].mean() for one in planned if one.bins is not None]
    assert max(means) < 1.5 * min(means)  # not sorted by length


def test_longer_side_gets_longer_rows() -> None:
    assert Packing.for_budget(4096, np.array([[40, 9], [60, 11]])) == Packing(4096 // (128 + 32), 128, 32)
    assert Packing.for_budget(159, np.array([[40, 9], [60, 11]])) is None


def _pairs(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """What a packed batch holds: of each pair its source, what is read and what is said, places checked."""
    assert batch.source is not None
    found = []
    for row in range(batch.size):
        read, said = batch.decoder_inputs, batch.labels
        assert batch.source.layout is not None
        assert said.layout is not None
        for owner in range(1, int(said.layout.segment_ids[row].max()) + 1):
            source = batch.source.layout.segment_ids[row] == owner
            target = said.layout.segment_ids[row] == owner
            for part, here in ((batch.source, source), (said, target)):
                assert part.layout is not None
                assert part.layout.positions[row][here].tolist() == list(range(int(here.sum())))
            found.append([part.values[row][here].tolist() for part, here in
                          ((batch.source, source), (read, target), (said, target))])  # fmt: skip
    return found  # type: ignore[return-value]


def test_packed_batches_contain_the_store(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text(
        "".join(f"{'abcde'[i % 5] * (1 + i % 11)}\t{'edcba'[i % 5] * (1 + i % 7)}{i % 10}\n" for i in range(90))
    )
    tokenizer = Tokenizer.train(["abcde0123456789"], "chars", 30)
    corpus = Corpus(path=str(tmp_path / "pairs.tsv"))
    store = build_store([corpus], tokenizer, tokenizer, Filters(), "error", tmp_path / "s")
    batches = Batches(store, np.arange(90), batch_tokens=140, bucket_batches=3, seed=2, packing=Packing(4, 16, 16))
    held = []
    for index in range(batches.batches_in(0)):
        batch = batches.at(DataPosition(0, index))
        assert batch.source is not None
        assert batch.source.values.shape == batch.decoder_inputs.values.shape == (4, 16)
        held += _pairs(batch)
    plain = gather(store, np.arange(90))
    assert plain.source is not None
    wanted = []
    for row in range(90):
        source = plain.source.values[row][plain.source.mask[row]].tolist()
        said = plain.labels.values[row][plain.labels.mask[row]].tolist()
        assert said[-1] == EOS
        wanted.append([source, [BOS, *said[:-1]], said])
    assert sorted(held) == sorted(wanted)


def test_packing_with_varying_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="known lengths"):
        _batches(_natural(10), packing=Packing(4, 16, 16), dropout=(0.1, 0.0), tokenizers=(None, None))
