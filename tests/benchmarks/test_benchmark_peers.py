"""The races of the benchmarks: the same maths on all sides, real tokens counted, one failure stops nobody."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("transformers")

from benchmarks import gpt2, recurrent, train
from benchmarks.harness import OURS, Contestant, measure

CPU = torch.device("cpu")


def test_the_failure_of_one_is_a_row_of_the_table() -> None:
    def fail() -> int:
        raise torch.OutOfMemoryError("no\n  room")

    rows = measure("any", [Contestant(OURS, lambda: 5), Contestant("bad", fail), Contestant("good", lambda: 5)], CPU, 2)
    found = {row.name: row for row in rows}
    assert found["bad"].failed == "OutOfMemoryError: no room"
    assert not found["good"].failed
    assert found["good"].ratio is not None


def test_arithmetic_is_counted() -> None:
    """181 million a token for base, counted by hand: 60.4 forward, and attention over 32 rows beside it."""
    batch = train.batch_of(train.SIZES["base"], 256, CPU)
    each = train.flops(train.SIZES["base"], batch) / (batch.tokens - batch.size)  # <s> is read, not said
    assert each == pytest.approx(181.3e6, rel=0.01)
    shape = gpt2.SIZES["base"]
    parameters = shape.layers * (4 * shape.width**2 + 2 * shape.width * shape.ff_width) + shape.width * shape.vocabulary
    assert gpt2.flops(shape, 1, 1024) / 1024 == pytest.approx(6 * parameters + 6 * 12 * 768 * 1024)


def test_mixed_batches_have_padding_and_count_real_tokens() -> None:
    batches = train.mixed_batches(train.SIZES["test"], 1024, CPU)
    race = train.Race(batches, CPU, False, False)
    slots = sum(batch.slots for batch in batches)
    assert len({batch.source.values.size(1) for batch in batches if batch.source is not None}) > 1
    assert 0.7 * slots < race.tokens < slots


def test_the_peers_compute_the_same() -> None:
    shape, places = gpt2.SIZES["test"], gpt2.PLACES["test"]
    assert gpt2.apart(shape, places, gpt2.batch_of(shape, places, 64, CPU)) < gpt2.CLOSE
    batch = train.batch_of(recurrent.SIZES["test"], 128, CPU)
    for cell in ("gru", "lstm"):
        model = recurrent.model_of(recurrent.SIZES["test"], cell, {"kind": "bahdanau"})
        for careful in (False, True):
            assert recurrent.same_losses(model, recurrent.Loop(model, careful), batch) < recurrent.CLOSE["cpu"]


def test_what_is_built_late_fails_late() -> None:
    def build() -> train.Step:
        raise RuntimeError("cannot be compiled")

    step = train.lazily(build)
    with pytest.raises(RuntimeError, match="compiled"):
        step()
