"""The Python interface: training, planning and evaluation as functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transduce import autoconfig
from transduce.autoconfig import Plan
from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation
from transduce.evaluation.held_out import evaluate_output, load_held_out, predict
from transduce.inference import Model, load
from transduce.inference.generation import check_pairs
from transduce.recipe import Recipe, override, parse
from transduce.storage import make_folder, replace_file
from transduce.training import experiment
from transduce.training.experiment import TrainingResult

if TYPE_CHECKING:
    from rich.console import Console

Data = str | Path | Recipe | Mapping[str, Any] | Iterable[tuple[str, str]]


def train(
    data: Data,
    folder: str | Path = "runs/latest",
    *,
    task: str = "generate",
    minutes: float | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    console: Console | None = None,
) -> TrainingResult:
    """Trains a model on pairs, a data file, or a recipe (a file, a mapping, a `Recipe`), into a run directory.

    Without a recipe the settings are chosen from the data. `settings` changes keys: `{"training.steps": 1000}`. Pairs
    in memory are stored beside the run directory. With a console the progress is shown. A resumed run has the recipe
    and the data that it began with, except for the recipe keys in `allow_changes`.
    """
    source = _stored(data, Path(folder))
    recipe = _recipe(source, task, minutes, settings or {})
    return experiment.train(recipe, folder, resume=resume, allow_changes=allow_changes, console=console)


def plan(
    data: str | Path, *, task: str = "generate", minutes: float | None = None, settings: Mapping[str, Any] | None = None
) -> Plan:
    """The recipe that `train` would choose for a data file, with its reasons. Nothing is trained or written."""
    return autoconfig.plan_for(str(data), _overrides(settings or {}), task, minutes)


def evaluate(model: Model | str | Path, data: str | None = None, **settings: Any) -> Evaluation:
    """Scores of a model on a data file, by default on the test set of its run. `settings` are those of `generate`."""
    model = model if isinstance(model, Model) else load(model)
    _, examples = load_held_out(model, data)
    output = predict(model, examples, model.recipe.evaluation.metrics, **settings)
    return evaluate_output(model, examples, output)


def _stored(data: Data, folder: Path) -> str | Path | Recipe | Mapping[str, Any]:
    """The data as `train` reads it: pairs in memory become a file beside the run directory."""
    if isinstance(data, (str, Path, Recipe, Mapping)):
        return data
    pairs = check_pairs("train", data)
    if not pairs:
        raise InputError("no pairs", remedy='write transduce.train([("source", "target"), ...])')
    path = make_folder(folder.parent) / f"{folder.name}.jsonl"
    lines = (json.dumps({"source": source, "target": target}, ensure_ascii=False) for source, target in pairs)
    replace_file(path, "".join(f"{line}\n" for line in lines))
    return path


def _recipe(
    source: str | Path | Recipe | Mapping[str, Any], task: str, minutes: float | None, settings: Mapping[str, Any]
) -> Recipe:
    overrides = _overrides(settings)
    if isinstance(source, (str, Path)):
        return autoconfig.recipe_for(str(source), overrides, task, minutes)
    if isinstance(source, Recipe) and not overrides and minutes is None:
        return source
    content = source.model_dump(mode="json", exclude_unset=True) if isinstance(source, Recipe) else source
    limits = [] if minutes is None else [f"training.minutes={minutes}"]
    return parse(override(content, [*limits, *overrides]))


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings in the form of the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]
