"""Benchmark peers: the same function on all sides, tokens without padding, failures of single implementations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("transformers")

from benchmarks import gpt2, recurrent, train
from benchmarks.harness import OURS, Implementation, measure

CPU = torch.device("cpu")


def test_a_failing_implementation_is_reported_and_does_not_stop_the_others() -> None:
    def fail() -> int:
        raise torch.OutOfMemoryError("no\n  room")

    rows = measure(
        "any", [Implementation(OURS, lambda: 5), Implementation("bad", fail), Implementation("good", lambda: 5)], CPU, 2
    )
    found = {row.name: row for row in rows}
    assert found["bad"].failed == "OutOfMemoryError: no room"
    assert not found["good"].failed
    assert found["good"].ratio is not None


def test_flops_agree_with_a_count_by_hand() -> None:
    """181 million per token for base: 60.4 million in the forward pass, and attention over 32 positions."""
    batch = train.batch_of(train.SIZES["base"], 256, CPU)
    each = train.flops(train.SIZES["base"], batch) / (batch.tokens - batch.size)  # <s> is no label
    assert each == pytest.approx(181.3e6, rel=0.01)
    shape = gpt2.SIZES["base"]
    parameters = shape.layers * (4 * shape.width**2 + 2 * shape.width * shape.ff_width) + shape.width * shape.vocabulary
    assert gpt2.flops(shape, 1, 1024) / 1024 == pytest.approx(6 * parameters + 6 * 12 * 768 * 1024)


def test_mixed_batches_have_padding_that_is_not_counted() -> None:
    batches = train.mixed_batches(train.SIZES["test"], 1024, CPU)
    case = train.TrainingCase(batches, CPU, False, False)
    slots = sum(batch.slots for batch in batches)
    assert len({batch.source.values.size(1) for batch in batches if batch.source is not None}) > 1
    assert 0.7 * slots < case.tokens < slots


def test_peers_compute_the_same_loss() -> None:
    shape, places = gpt2.SIZES["test"], gpt2.PLACES["test"]
    assert gpt2.apart(shape, places, gpt2.batch_of(shape, places, 64, CPU)) < gpt2.CLOSE
    batch = train.batch_of(recurrent.SIZES["test"], 128, CPU)
    for cell in ("gru", "lstm"):
        model = recurrent.model_of(recurrent.SIZES["test"], cell, {"kind": "bahdanau"})
        for careful in (False, True):
            assert recurrent.same_losses(model, recurrent.Loop(model, careful), batch) < recurrent.CLOSE["cpu"]


def test_a_lazily_built_step_fails_when_it_is_run() -> None:
    def build() -> train.Step:
        raise RuntimeError("cannot be compiled")

    step = train.lazily(build)
    with pytest.raises(RuntimeError, match="compiled"):
        step()
