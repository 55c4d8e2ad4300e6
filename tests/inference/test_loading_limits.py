"""Runs with wrong sizes or values: refused before memory is allocated, with the bytes or the tensor that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from export_fixtures import make_run, pair

import transduce
from transduce.errors import InputError
from transduce.inference import Model
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe
from transduce.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", pair())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return transduce.load(make_run(tmp_path_factory.mktemp("limits") / "run", pair()).folder, device="cpu")


def change(run: Run, **options: Any) -> None:
    content = yaml.safe_load(run.recipe_file.read_text())
    for side in ("encoder", "decoder"):
        content["model"][side] |= options
    run.recipe_file.write_text(yaml.safe_dump(content))
    run.checkpoints.rebind()  # as a hostile run would be


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layers": 10**6}, "layers: more than 1,000 cannot be built"),
        ({"width": 10**6}, "bytes"),
        ({"layers": 3}, "missing"),
        ({"ff_width": 4096}, "in the weights"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused(options: dict[str, Any], problem: str, run: Run) -> None:
    change(run, **options)
    with pytest.raises(InputError, match=problem):
        transduce.load(run.folder, device="cpu")


def test_shapes_are_compared_before_memory_is_allocated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run, width=2048)
    monkeypatch.setattr("transduce.inference.loading._placed", None)
    largest = 0
    empty = torch.empty

    def watch(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        made = empty(*shape, **options)
        largest = max(largest, 0 if made.is_meta else made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watch)
    with pytest.raises(InputError, match="in the weights"):
        transduce.load(run.folder, device="cpu")
    assert largest < 10_000


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(value: float, run: Run) -> None:
    weights = dict(run.checkpoints.for_inference().weights)  # type: ignore[union-attr]
    name = "decoder.layers.1.feed_forward.fc1.weight"
    weights[name] = weights[name].clone()
    weights[name][3, 2] = value
    run.checkpoints.save_final(0, weights, {})
    with pytest.raises(InputError, match=rf"{name} has values that are not finite"):
        transduce.load(run.folder, device="cpu")


def test_a_model_of_too_many_tensors_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.recipe.build.MAX_TENSORS", 100)
    part = {"kind": "transformer", "layers": 6}
    with pytest.raises(InputError, match="more than 100 weight tensors"):
        complete_recipe(parse({"model": {"encoder": part, "decoder": part}}))


def test_a_model_that_does_not_fit_the_memory_is_refused_with_its_bytes() -> None:
    part = {"kind": "transformer", "width": 2**20, "heads": 8}
    with pytest.raises(InputError, match=r"would need [\d,]{15,} bytes"):
        complete_recipe(parse({"model": {"encoder": part, "decoder": part}}))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"suppress": [10**6]}, "suppress: there is no token 1000000"),
        ({"suppress": [-1]}, "suppress: there is no token -1"),
        ({"suppress_first": [10**6]}, "suppress_first"),
        ({"forced_bos": 10**6}, "forced_bos"),
        ({"forced_prefix": [10**6]}, "forced_prefix"),
        ({"beam": 10**9}, "bytes|cannot be built"),
        ({"beam": 10**7}, "bytes|cannot be built"),
        ({"strategy": {"kind": "beam", "width": 10**9}}, "cannot be built"),
        ({"min_length": 10**40}, "62 bits"),
    ],
)
def test_search_settings_beyond_the_model_are_refused(settings: dict[str, Any], problem: str, model: Model) -> None:
    with pytest.raises(InputError, match=problem):
        model.generate(["w1"], **settings)


@pytest.mark.parametrize("wrong", [7, 0.5, [1], True])
def test_a_source_that_is_no_modality_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"data\.sources"):
        parse({"data": {"sources": {"picture": wrong}, "train": "a.tsv"}})
