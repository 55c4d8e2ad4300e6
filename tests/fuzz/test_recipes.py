"""Damaged and odd recipes, overrides and search settings: an InputError, or a model that generates."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_fixtures import TEXTS, make_run, pair
from fuzzing import ODD_VALUES, Outcome, fuzz, mutate_bytes, mutate_tree

import transduce
from transduce.inference import Model
from transduce.recipe import GenerationRecipe, load, override, parse
from transduce.recipe.build import complete_recipe
from transduce.run import Run

KEPT = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.yaml"))
HOSTILE = (
    "&a [*a]", "[" * 5000, "{a: " * 5000, "9" * 5000, "!!python/name:os.system", "2001-99-99", "{a: 1, a: 2}",
    "&a {<<: *a}", "0x_", "=", "~", "*b", "{unclosed", "1:1:1", "!!binary x", "- ? - ?", ".inf", "? [a]\n: 1",
)  # fmt: skip


def _mutated(draw: random.Random, text: str) -> bytes:
    kind = draw.random()
    if kind < 0.4:
        return mutate_bytes(draw, text.encode())
    if kind < 0.6:
        lines = text.splitlines()
        where = draw.randrange(len(lines))
        key = lines[where].partition(":")[0]
        return "\n".join([*lines[:where], f"{key}: {draw.choice(HOSTILE)}", *lines[where + 1 :]]).encode()
    return yaml.safe_dump(mutate_tree(draw, yaml.safe_load(text)), sort_keys=False).encode()


def test_damaged_recipes(tmp_path: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in KEPT]
    path = tmp_path / "recipe.yaml"

    def attempt(draw: random.Random) -> Outcome:
        path.write_bytes(_mutated(draw, draw.choice(texts)))
        overrides = [f"{draw.choice(('model.decoder.width', 'a', 'training.steps'))}={draw.choice(HOSTILE)}"]
        complete_recipe(load(path, overrides if draw.random() < 0.2 else []))
        return "accepted"

    fuzz("recipes", "recipes and overrides", attempt, cases=150)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("fuzz") / "run", pair())


def test_damaged_recipes_of_runs(run: Run) -> None:
    """A changed recipe may make another model of the same weights, which then answers in its own way."""
    text = run.recipe_file.read_text(encoding="utf-8")

    def attempt(draw: random.Random) -> Outcome:
        try:
            run.recipe_file.write_bytes(_mutated(draw, text))
            run.checkpoints.rebind()  # as a forger would; otherwise the hash alone refuses every change
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                transduce.load(run.folder, device="cpu").generate(TEXTS[:2], max_length=4)
        finally:
            run.recipe_file.write_text(text, encoding="utf-8")
            run.checkpoints.rebind()
        return "accepted"

    fuzz("recipes of runs", "recipe.yaml of a finished run, with forged hashes", attempt, cases=50)


def _odd_settings(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(sorted(GenerationRecipe.model_fields), draw.choice((1, 1, 2)))
    numbers = (10**6, 10**7, -5, 3, 0.1, [10**9], [-1], [3, 25], {"kind": "beam", "width": 10**6}, "sample", "beam")
    return {name: draw.choice((*ODD_VALUES, *numbers)) for name in names}


def test_odd_search_settings(run: Run) -> None:
    model: Model = transduce.load(run.folder, device="cpu")

    def attempt(draw: random.Random) -> Outcome:
        settings = {"max_length": 4, "beam": 2, **_odd_settings(draw)}
        if draw.random() < 0.3:
            items = [f"{name}={yaml.safe_dump(value, default_flow_style=True)}" for name, value in settings.items()]
            settings = override({}, items)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.generate(TEXTS[:2], **settings)
        assert len(found) == 2
        return "accepted"

    fuzz("search settings", "settings of the search", attempt, cases=100)


def test_undamaged_recipes_are_read() -> None:
    for path in KEPT:
        complete_recipe(load(path))
    parse({})
