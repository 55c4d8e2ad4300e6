"""Training of an ensemble: members with different seeds in one run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from transduce.data.prepare import prepare_data
from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation
from transduce.evaluation.held_out import evaluate_output, group_references, predict, read_corpora
from transduce.inference import Model, load
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.storage import optional_write
from transduce.training.distributed import Processes
from transduce.training.experiment import is_finished, train
from transduce.training.lock import lock_run
from transduce.training.report import Report, TrainingTable
from transduce.training.resolve import resolve
from transduce.training.trainer import Outcome


@dataclass(frozen=True)
class EnsembleResult:
    """A trained ensemble, or what an interrupted training has so far: then there is no model."""

    run: Run
    model: Model | None
    members: dict[str, dict[str, float]]  # development scores of each finished member, and of the ensemble
    scores: dict[str, Evaluation]  # of the ensemble, by data set: dev, test
    signal: int | None = None  # that interrupted the training


def train_ensemble(
    recipe: Recipe,
    folder: str | Path,
    members: int,
    *,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    console: Console | None = None,
) -> EnsembleResult:
    """Trains members with consecutive seeds in `folder/members/N`, and evaluates them as one model.

    All have the development set of the first. With `resume`, finished members are kept, and one that was interrupted
    continues. Afterwards the folder is loaded as an ensemble.
    """
    run, requested = Run(Path(folder)), resolve(recipe)
    check_folder(run, members, resume)
    recipes = [with_seed(requested, requested.training.seed + number) for number in range(members)]
    with lock_run(run.folder, Processes()), TrainingTable(console or Console(quiet=True)) as table:
        folders = [run.folder / "members" / str(number) for number in range(1, members + 1)]
        found: dict[str, dict[str, float]] = {}
        for one, own in zip(recipes, folders, strict=True):
            row = table.row(f"member {own.name}", f"seed {one.training.seed}")
            outcome = train_once(one, own, row, allow_changes)
            if outcome is not None and outcome.reason == "interrupted":
                return EnsembleResult(run, None, found, {}, outcome.signal)
            found[row.name] = development_scores(Run(own))
            row.finish(found[row.name])
        run.save_members(folders)
        row = table.row("ensemble", f"{members} members")
        model, scores = evaluate_ensemble(run, requested.training.device)
        found[row.name] = {name: score.value for name, score in scores["dev"].scores.items()}
        row.finish(found[row.name])
        save_ensemble_metrics(run, model, scores, found)
    return EnsembleResult(run, model, found, scores)


def check_folder(run: Run, members: int, resume: bool) -> None:
    """Refuses fewer than two members, several processes, and a folder that is another run or may not be continued."""
    if members < 2:
        raise InputError("an ensemble has at least 2 members", where="--ensemble", remedy="leave it out, or give 5")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "the members of an ensemble are trained by one process",
            where="--ensemble",
            remedy="train runs with training.seed=1, 2, ... and combine them: transduce evaluate RUN1,RUN2",
        )
    begun = any((run.folder / name).exists() for name in (run.ensemble_file.name, "members", "trials"))
    if run.exists or (begun and not resume):
        raise InputError(
            "there is already a run in this folder",
            where=str(run.folder),
            remedy="give another --run" if run.exists else "continue it with --resume, or give another --run",
        )


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with another seed and the same development set."""
    held = recipe.training.seed if recipe.data.dev_seed is None else recipe.data.dev_seed
    data = recipe.data.model_copy(update={"dev_seed": held})
    return recipe.model_copy(update={"data": data, "training": recipe.training.model_copy(update={"seed": seed})})


def train_once(recipe: Recipe, folder: Path, watcher: Report, allow_changes: Sequence[str] = ()) -> Outcome | None:
    """Trains or resumes a run; None: it was finished already, with this recipe and this data."""
    if is_finished(Run(folder), recipe):
        return None
    return train(recipe, folder, resume=True, allow_changes=allow_changes, watcher=watcher).outcome


def development_scores(run: Run) -> dict[str, float]:
    """The scores of a finished run on its development set."""
    found = run.metrics().get("dev", {}).get("scores", {})
    return {name: float(score["value"]) for name, score in found.items()}


def evaluate_ensemble(run: Run, device: str) -> tuple[Model, dict[str, Evaluation]]:
    """The ensemble of a folder, and its scores on the development set, and the test set if there is one."""
    model = load(run.folder, device=device, trust_user_code=True)  # the code that the members were trained with
    return model, evaluate_model(model)


def evaluate_model(model: Model) -> dict[str, Evaluation]:
    """The scores of a model on the development set of its recipe, and on the test set if there is one."""
    settings = model.recipe
    sets = {"dev": prepare_data(settings, (model.source, model.target)).dev_examples()}
    if settings.data.test:
        sets["test"] = read_corpora(settings.data.test, model)
    scores = {}
    for name, examples in sets.items():
        lines = group_references(examples, settings.evaluation)
        scores[name] = evaluate_output(model, lines, predict(model, lines, settings.evaluation.metrics))
    return scores


def save_ensemble_metrics(
    run: Run, model: Model, scores: dict[str, Evaluation], members: dict[str, dict[str, float]]
) -> None:
    content = {
        **{name: score.to_json() for name, score in scores.items()},
        "parameters": model.parameters,
        "members": members,
    }
    with optional_write(run.metrics_file, "the scores are only printed"):
        run.save_metrics(content)
