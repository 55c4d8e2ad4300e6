"""`batch_tokens: auto`: the largest batch that fits is found, written down, and the same when a run goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.prepare import prepare_data, train_tokenizers
from transduce.flow import Batch
from transduce.objectives import CrossEntropy, Loss
from transduce.recipe import Recipe, parse
from transduce.run import Run
from transduce.training.batch_size import DEFAULT_TOKENS, MARGIN, largest_fitting, trial_updates, worst_batch
from transduce.training.experiment import train
from transduce.training.resolve import settle


@given(limit=st.integers(1, 10**6), most=st.integers(1, 10**6))
def test_the_largest_that_fits_less_a_margin(limit: int, most: int) -> None:
    asked = []

    def run(budget: int) -> None:
        asked.append(budget)
        if budget > limit:
            raise RuntimeError("CUDA out of memory: no room")

    found = largest_fitting(run, most)
    if most <= limit:
        assert found == most  # all fit: nothing to keep away from
    else:
        assert found <= max(1, MARGIN * limit)
        assert found >= max(1, int(MARGIN * (limit * 8 // 9 - 1)))
    assert len(asked) <= 2 * 20
    assert max(asked) <= most


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def run(budget: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_fitting(run, 10**5)


def asked(folder: Path) -> Recipe:
    pairs = folder / "pairs.tsv"
    lines = ["".join("abcde"[(i * k) % 5] for k in range(1, 2 + i % 9)) for i in range(60)]
    pairs.write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines), encoding="utf-8")
    part = {"kind": "transformer", "width": 8, "heads": 2, "ff_width": 8, "layers": 1}
    return settle(
        parse(
            {
                "data": {"train": [str(pairs)], "cache": str(folder / "cache")},
                "tokens": {"source": {"kind": "chars"}, "target": {"kind": "chars"}},
                "model": {"encoder": part, "decoder": part},
                "training": {"batch_tokens": "auto", "steps": 2, "device": "cpu"},
            }
        )
    )


def test_on_a_cpu_a_plain_number_is_saved_and_goes_on(tmp_path: Path) -> None:
    recipe = asked(tmp_path)
    train(recipe, tmp_path / "run")
    saved = Run(tmp_path / "run").recipe()
    assert saved.training.batch_tokens == DEFAULT_TOKENS
    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": 3})})
    outcome = train(longer, tmp_path / "run", resume=True).outcome
    assert outcome.step == 3


def test_the_trial_is_a_batch_of_the_longest_rows(tmp_path: Path) -> None:
    recipe = asked(tmp_path)
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    batch = worst_batch(recipe, tokenizers, data, 100)
    assert batch.slots <= 100
    longest = data.train.lengths[data.rows].max(1)
    assert set(data.train.lengths[list(batch.rows)].max(1)) == {longest.max()}


def test_a_device_is_tried_out(tmp_path: Path) -> None:
    recipe = asked(tmp_path)
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)

    class Scarce(CrossEntropy):
        def __call__(self, model: Any, batch: Batch) -> Loss:
            if batch.slots > 300:
                raise RuntimeError("out of memory")
            return super().__call__(model, batch)

    run = partial(trial_updates, recipe, tokenizers, data, Scarce(), torch.device("cpu"))
    assert MARGIN * 250 < largest_fitting(run, 10**4) <= MARGIN * 321  # rows of 21 slots
