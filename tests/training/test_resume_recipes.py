"""Continuation of recipes: the round trip through YAML, and a resumed run of every modality on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_fixtures import logged_losses, run_processes

from transduce.autoconfig import recipe_for
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.synthetic import SYNTHETIC, generate, write_files
from transduce.training.experiment import train
from transduce.training.resolve import resolve, resumed_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
MODALITIES = {"text": "copy", "image": "shapes", "audio": "sung-digits", "video": "moving-shapes"}
TINY = [
    "model.encoder.width=8",
    "model.decoder.width=8",
    "training.batch_tokens=200",
    "training.log_every=1",
    "training.validate_examples=1",
    "training.monitor=loss",
    "training.device=cpu",
    "data.dev_size=1",
    "generation.strategy=greedy",
    "generation.max_length=4",
    "evaluation.metrics=[exact]",
    "evaluation.resamples=2",
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kept_recipe_equals_the_one_its_run_reads_back(path: Path, tmp_path: Path) -> None:
    recipe, run = resolve(path), Run(tmp_path)
    run.save_recipe(recipe)
    assert run.recipe() == recipe
    assert resumed_recipe(run.recipe(), recipe, "recipe.yaml") == recipe


def write_pairs(name: str, folder: Path) -> Path:
    if SYNTHETIC[name].writes_files:
        return write_files(name, folder / "files", 8)
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{one.source}\t{one.target}\n" for one in generate(name, 8)), encoding="utf-8")
    return pairs


def tiny_recipe(name: str, pairs: Path, steps: int) -> Recipe:
    settings = [*TINY, f"training.steps={steps}", f"data.cache={pairs.parent / 'cache'}"]
    return recipe_for(str(pairs), settings, SYNTHETIC[name].task)


@pytest.mark.slow
@pytest.mark.parametrize("modality", MODALITIES)
def test_every_modality_trains_on_two_processes_and_resumes(modality: str, tmp_path: Path) -> None:
    name = MODALITIES[modality]
    pairs, run = write_pairs(name, tmp_path), tmp_path / "run"
    recipe = tiny_recipe(name, pairs, 1).model_dump(mode="json")
    assert run_processes({"do": "together", "options": {"recipe": recipe, "folder": str(run)}, "size": 2}) == [[0, 0]]
    assert train(tiny_recipe(name, pairs, 2), run, resume=True).outcome.step == 2
    assert list(logged_losses(run)) == [1, 2]
