"""Settings that the device decides (`batch_tokens: auto`, `precision: auto`), and the time of an update."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.prepare import prepare_data, train_tokenizers
from transduce.evaluation.evaluate import SystemOutput
from transduce.evaluation.held_out import predict
from transduce.flow import Batch
from transduce.inference import Model
from transduce.objectives import CrossEntropy, Loss
from transduce.recipe import Recipe, build, parse
from transduce.run import Run
from transduce.training.experiment import VALIDATION_TOKENS, train, validation
from transduce.training.resolve import (
    DEFAULT_TOKENS,
    MARGIN,
    largest_fitting,
    resolve,
    resumed_recipe,
    seconds_per_update,
    trial_updates,
    with_precision,
    worst_batch,
)


@given(limit=st.integers(1, 10**6), most=st.integers(1, 10**6))
def test_largest_fitting_batch_less_a_margin(limit: int, most: int) -> None:
    tried = []

    def run(tokens: int) -> None:
        tried.append(tokens)
        if tokens > limit:
            raise RuntimeError("CUDA out of memory: no room")

    found = largest_fitting(run, most)
    if most <= limit:
        assert found == most  # all fit: no margin
    else:
        assert found <= max(1, MARGIN * limit)
        assert found >= max(1, int(MARGIN * (limit * 8 // 9 - 1)))
    assert len(tried) <= 2 * 20
    assert max(tried) <= most


def test_other_errors_of_the_trial_are_raised() -> None:
    def run(tokens: int) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_fitting(run, 10**5)


def small_recipe(folder: Path) -> Recipe:
    pairs = folder / "pairs.tsv"
    lines = ["".join("abcde"[(i * k) % 5] for k in range(1, 2 + i % 9)) for i in range(60)]
    pairs.write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines), encoding="utf-8")
    part = {"kind": "transformer", "width": 8, "heads": 2, "ff_width": 8, "layers": 1}
    return resolve(
        parse(
            {
                "data": {"train": [str(pairs)], "cache": str(folder / "cache")},
                "tokens": {"source": {"kind": "chars"}, "target": {"kind": "chars"}},
                "model": {"encoder": part, "decoder": part},
                "training": {"batch_tokens": "auto", "steps": 2, "device": "cpu"},
                "generation": {"strategy": "greedy", "max_length": 12},
                "evaluation": {"metrics": ["exact"], "resamples": 10},
            }
        )
    )


@pytest.mark.slow
def test_automatic_settings_on_a_cpu_are_saved_and_kept_on_resume(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    train(recipe, tmp_path / "run")
    saved = Run(tmp_path / "run").recipe()
    assert saved.training.batch_tokens == DEFAULT_TOKENS
    assert saved.training.packing is False
    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": 3})})
    outcome = train(longer, tmp_path / "run", resume=True).outcome
    assert outcome.step == 3


def test_worst_batch_has_the_longest_rows(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)
    batch = worst_batch(recipe, tokenizers, data, 100)
    assert batch.slots <= 100
    longest = data.train.lengths[data.rows].max(1)
    assert set(data.train.lengths[list(batch.rows)].max(1)) == {longest.max()}


def test_trial_updates_find_the_memory_limit(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    tokenizers = train_tokenizers(recipe)
    data = prepare_data(recipe, tokenizers)

    class LimitedMemory(CrossEntropy):
        def __call__(self, model: Any, batch: Batch) -> Loss:
            if batch.slots > 300:
                raise RuntimeError("out of memory")
            return super().__call__(model, batch)

    run = partial(trial_updates, recipe, tokenizers, data, LimitedMemory(), torch.device("cpu"))
    assert MARGIN * 250 < largest_fitting(run, 10**4) <= MARGIN * 321  # rows of 21 slots


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "fp32")])
@pytest.mark.parametrize("instruction", ["avx512_bf16", "amx_bf16"])
def test_precision_auto_is_bf16_where_the_device_computes_with_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool, expected: str, instruction: str
) -> None:
    recipe = parse({"training": {"precision": "auto"}})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    capabilities = {"avx512_bf16": False, "amx_bf16": False, instruction: supported}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    for device in ("cuda", "cpu"):
        resolved = with_precision(recipe, torch.device(device))
        assert resolved.training.precision == expected
        assert resumed_recipe(resolved, recipe, "").training.precision == expected


def test_precision_auto_is_fp32_where_the_instructions_of_the_cpu_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    recipe = parse({"training": {"precision": "auto"}})
    assert with_precision(recipe, torch.device("cpu")).training.precision == "fp32"


def test_seconds_per_update_are_the_clock_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts slots in place of seconds: the time of an update is the size of its batch."""
    clock = 0.0

    class SlotClock(CrossEntropy):
        def __call__(self, model: Any, batch: Batch) -> Loss:
            nonlocal clock
            clock += batch.slots
            return super().__call__(model, batch)

    monkeypatch.setattr("transduce.training.resolve.CrossEntropy", SlotClock)
    monkeypatch.setattr("transduce.training.resolve.time", SimpleNamespace(monotonic=lambda: clock))
    part = {"kind": "recurrent", "width": 16}
    for tokens in (40, 1_000):
        recipe = parse({"model": {"encoder": part, "decoder": part}, "training": {"batch_tokens": tokens}})
        found = seconds_per_update(build.complete_recipe(recipe), torch.device("cpu"), (12, 9), (6, 5))
        assert tokens - 15 < found <= tokens


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({}, VALIDATION_TOKENS),
        ({"batch_tokens": 500}, 2500),
        ({"batch_tokens": 500, "beam": 2}, 1000),
        ({"batch_tokens": 500, "strategy": "greedy"}, 500),
        ({"batch_tokens": 20_000}, 20_000),
    ],
)
def test_a_validation_searches_no_more_hypotheses_than_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], together: int
) -> None:
    """Who lowers `generation.batch_tokens` has too little memory for more."""
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("red\tRED\ngreen\tGREEN\n")
    part = {"kind": "recurrent", "width": 8}
    data = {"train": str(pairs), "dev": str(pairs)}
    recipe = resolve({"data": data, "model": {"encoder": part, "decoder": part}, "generation": settings})
    tokenizers = train_tokenizers(recipe)
    model = Model(build.build_model(recipe.model, *(one.size for one in tokenizers)).eval(), *tokenizers, recipe)
    searched: list[int] = []

    def generate(model: Model, *given: Any, batch_tokens: int, **options: Any) -> SystemOutput:
        searched.append(batch_tokens)
        return predict(model, *given, batch_tokens=batch_tokens, **options)

    monkeypatch.setattr("transduce.training.experiment.predict", generate)
    scores = validation(model, prepare_data(recipe, tokenizers))(model.network)
    assert scores.keys() >= {"loss", *recipe.evaluation.metrics}
    assert searched == [together]
