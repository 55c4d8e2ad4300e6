"""Every task has a recipe without a recipe: the columns of its file, tokens, a model that can be built, its metrics."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from transduce.autoconfig import plan_for, recipe_for
from transduce.autoconfig.tasks import TASK_RECIPES
from transduce.cli import app
from transduce.cli.train import train
from transduce.errors import InputError
from transduce.recipe import build
from transduce.synthetic import SYNTHETIC, generate

COPIED = ("summarise", "answer", "converse", "describe")


def written(path, name: str, count: int = 100, held_out: bool = False) -> str:
    lines = generate(name, count, held_out=held_out)
    sides = (f"{one.source}\t{one.target}" if SYNTHETIC[name].columns else one.target for one in lines)
    path.write_text("".join(f"{line}\n" for line in sides), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", [name for name, dataset in SYNTHETIC.items() if not dataset.writes_files])
def test_every_text_dataset_has_a_task_whose_recipe_builds(name, tmp_path):
    dataset = SYNTHETIC[name]
    held_out = written(tmp_path / "test.tsv", name, held_out=True)
    settings = [f"data.test={held_out}", *dataset.settings]
    plan = plan_for(written(tmp_path / "train.tsv", name), settings, dataset.task)
    recipe = plan.recipe
    assert {"training.steps", "training.patience"} <= plan.reasons.keys()
    assert any(key.startswith("model.") for key in plan.reasons)
    for corpus in () if dataset.settings else (*recipe.data.train, *recipe.data.test):
        assert corpus.format != "pairs" if dataset.columns == 0 else corpus.source_columns == dataset.columns
    completed = build.complete_recipe(recipe)
    build.build_model(completed.model, 100, 100)
    assert recipe.training.monitor in (("loss",) if dataset.columns == 0 else recipe.evaluation.metrics)
    assert recipe.training.schedule.warmup < recipe.training.steps
    assert (recipe.model.copy is not None) == (dataset.task in COPIED)
    assert bool(recipe.tokens.oov_placeholders) == (dataset.task in COPIED)


@pytest.mark.parametrize(
    ("task", "kinds", "metrics"),
    [
        ("translate", ("bpe", "bpe"), ("bleu", "chrf")),
        ("pronounce", ("chars", "words"), ("exact", "per")),
        ("transliterate", ("chars", "chars"), ("exact", "cer")),
        ("summarise", ("words", "words"), ("rouge1", "rouge2", "rougeL")),
    ],
)
def test_the_task_decides_whatever_the_lines_look_like(task, kinds, metrics, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"a{number} b c\td e{number}\n" for number in range(50)))
    recipe = recipe_for(str(path), [], task)
    build.complete_recipe(recipe)
    assert (recipe.tokens.source.kind, recipe.tokens.target.kind) == kinds
    assert recipe.evaluation.metrics == metrics


def test_a_talk_has_as_many_turns_as_its_file_has_columns(tmp_path):
    path = tmp_path / "talks.tsv"
    path.write_text("\thello\thi\nhow are you\tfine\tgood\n")
    assert recipe_for(str(path), [], "converse").data.train[0].source_columns == 2
    said = f"data.train={{path: {path}, source_columns: 1}}"
    assert recipe_for(str(path), [said], "converse").data.train[0].source_columns == 1


def test_help_has_one_line_for_each_task():
    assert set(re.findall(r"^ +- ([\w-]+): ", train.__doc__ or "", re.MULTILINE)) == set(TASK_RECIPES)


def test_lines_of_a_set_are_written(tmp_path):
    listed = CliRunner().invoke(app, ["data"])
    assert all(name in listed.output for name in SYNTHETIC)
    file = tmp_path / "lines.tsv"
    shown = CliRunner().invoke(app, ["data", "questions", "--count", "7", "--held-out"])
    CliRunner().invoke(app, ["data", "questions", "--count", "7", "--held-out", "--output", str(file)])
    lines = [f"{one.source}\t{one.target}\n" for one in generate("questions", 7, held_out=True)]
    assert shown.output == file.read_text() == "".join(lines)
    unknown = CliRunner().invoke(app, ["data", "quest"])
    assert isinstance(unknown.exception, InputError)
