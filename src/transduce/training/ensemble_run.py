"""Training of several networks: ensembles, and successive halving over a portfolio of recipes; efforts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from transduce.autoconfig.sizes import LETTERS, MONOTONIC, PlannedEnsemble
from transduce.data.prepare import prepare_data
from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation, metric_class
from transduce.evaluation.held_out import evaluate_output, group_references, predict, read_corpora
from transduce.inference import Model, load
from transduce.parsing import read_json
from transduce.recipe import Recipe, parse
from transduce.run import Run, lock_run
from transduce.storage import json_line, make_folder, optional_write, replace_file
from transduce.training.distributed import Processes
from transduce.training.experiment import is_finished, train
from transduce.training.report import Report, TrainingTable, read_log
from transduce.training.resolve import resolve
from transduce.training.trainer import Outcome

EFFORTS = ("quick", "normal", "best")
QUICK_SHARE = 1 / 5  # of the updates and of the time
NORMAL = "normal"
PLAN = "members/plan.json"  # how many members an ensemble has, and of which networks
MAX_PLAN = 2**16  # bytes
SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the updates, in each rung; after each, the better half goes on (Jamieson 2016)
# Different networks of the final ensemble. On average over the development sets of the grid, four networks together
# were better than the best one of them alone (benchmarks/results/autoconfig.jsonl: mixed: 4 networks).
NETWORKS = 4


@dataclass(frozen=True)
class Variant:
    """A recipe with a name."""

    name: str
    recipe: Recipe


def shortened(recipe: Recipe, share: float, given: Sequence[str] = ()) -> Recipe:
    """The recipe with a share of its updates, time and warm-up; the keys in `given`, as `training.steps`, are kept."""
    training = recipe.training
    steps = max(1, round(training.steps * share))
    check = max(1, min(round(training.validate_every * share), steps))
    changes: dict[str, Any] = {
        "steps": steps,
        "minutes": None if training.minutes is None else training.minutes * share,
        "validate_every": check,
        "checkpoint_every": check,
        "schedule": training.schedule.model_copy(update={"warmup": round(training.schedule.warmup * share)}),
    }
    kept = {name: value for name, value in changes.items() if not any(_is(key, f"training.{name}") for key in given)}
    return recipe.model_copy(update={"training": training.model_copy(update=kept)})


def _is(key: str, name: str) -> bool:
    return f"{key}.".startswith(f"{name}.")


def sharing_time(recipe: Recipe, members: int) -> Recipe:
    """The recipe of each of several networks, which share the time of one."""
    minutes = recipe.training.minutes
    if minutes is None:
        return recipe
    return recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"minutes": round(minutes / members, 2)})}
    )


def time_of_trainings(recipe: Recipe, members: int, *, search: bool) -> str | None:
    """How many trainings an ensemble or a search has, and how long they take at most; None: there is no limit."""
    minutes = recipe.training.minutes
    if minutes is None:
        return None
    trials, parts, left = 0, 0.0, len(portfolio(resolve(recipe))) if search else 0
    for share in SHARES if search else ():
        if left > 1:
            trials, parts, left = trials + left, parts + share * left, -(-left // 2)
    full = members + 1 if search else members
    together = f"{trials} short trainings and {full} in full" if search else f"{full} trainings"
    total = (parts + full) * minutes
    return f"{together}, of at most {minutes:g} minutes each: at most {total:.0f} minutes in all"


def with_effort(recipe: Recipe, effort: str, overrides: Sequence[str]) -> Recipe:
    """The recipe that an effort begins with: shortened where it is quick, except for keys that the user gave."""
    if effort not in EFFORTS:
        raise InputError(f"unknown effort {effort!r}", where="--effort", remedy=", ".join(EFFORTS))
    given = [item.partition("=")[0] for item in overrides]
    return shortened(recipe, QUICK_SHARE, given) if effort == "quick" else recipe


def portfolio(recipe: Recipe) -> list[Variant]:
    """The completed recipe itself, which is first, and variants with the same data, tokens and metrics.

    Letters: networks of the record `benchmarks/results/autoconfig.jsonl`. Other texts: widths and dropout. If
    weights are initialised, or a source is not one text, the network stays and dropout varies.
    """
    model, init = recipe.model, recipe.init
    resizable = not (init.model or init.encoder or init.decoder or recipe.data.sources)
    if resizable and recipe.tokens.source.kind == "chars" and model.encoder and model.decoder and not model.copy:
        changes = _letters()
    else:
        changes = _sizes(model.model_dump(mode="json"), resizable)
    content = recipe.model_dump(mode="json")
    variants = [Variant(NORMAL, recipe)]
    for name, change in changes.items():
        training = {**content["training"], **change.get("training", {})}
        found = parse({**content, "model": change["model"], "training": training})
        if found.model != model:
            variants.append(Variant(name, found))
    return variants


def _sizes(model: dict[str, Any], resizable: bool) -> dict[str, dict[str, Any]]:
    """Other rates of dropout, and other widths where the network may change."""
    changes = {f"dropout {rate}": {"model": _scaled(model, ("dropout",), 0, rate)} for rate in (0.1, 0.2, 0.3)}
    if resizable:
        for name, factor in (("twice as wide", 2.0), ("half as wide", 0.5)):
            changes[name] = {"model": _scaled(model, ("width", "ff_width"), factor)}
    return changes


def _letters() -> dict[str, dict[str, Any]]:
    """The recorded networks for letters, with their rates, batches and smoothing."""
    return {
        one.record[1]: {
            "model": one.model,
            "training": {
                "optimiser": {"learning_rate": one.training.learning_rate},
                "batch_tokens": one.training.batch_tokens,
                "objective": {"kind": "cross_entropy", "label_smoothing": one.training.label_smoothing},
            },
        }
        for table in (LETTERS, MONOTONIC)
        for candidates in table.values()
        for one in candidates
        if one.record[1]
    }


def _scaled(tree: Any, options: Sequence[str], factor: float, plus: float = 0) -> Any:
    """A tree of parts in which every number of these names is multiplied, and increased."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        name: type(value)(value * factor + plus)
        if name in options and isinstance(value, int | float)
        else _scaled(value, options, factor, plus)
        for name, value in tree.items()
    }


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
    networks: Sequence[str] = (NORMAL,),
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    console: Console | None = None,
) -> EnsembleResult:
    """Trains members with consecutive seeds in `folder/members/N`, and evaluates them as one model.

    They take turns among the `networks`, which are names in the portfolio of the recipe. All have the development set
    of the first. With `resume`, finished members are kept, and one that was interrupted continues. Afterwards the
    folder is loaded as an ensemble.
    """
    run, requested = Run(Path(folder)), resolve(recipe)
    check_folder(run, members, resume)
    known = {one.name: one.recipe for one in portfolio(requested)}
    turns = [networks[number % len(networks)] for number in range(members)]
    recipes = [with_seed(known[name], requested.training.seed + number) for number, name in enumerate(turns)]
    with lock_run(run.folder, Processes()), TrainingTable(console or Console(quiet=True)) as table:
        save_plan(run, PlannedEnsemble(members, tuple(networks)))
        folders = [run.folder / "members" / str(number) for number in range(1, members + 1)]
        found: dict[str, dict[str, float]] = {}
        for one, own, name in zip(recipes, folders, turns, strict=True):
            network = "" if name == NORMAL else f"{name}, "
            row = table.row(f"member {own.name}", f"{network}seed {one.training.seed}")
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


def save_plan(run: Run, plan: PlannedEnsemble) -> None:
    make_folder((run.folder / PLAN).parent)
    replace_file(run.folder / PLAN, json.dumps({"members": plan.members, "networks": plan.networks}) + "\n")


def saved_plan(run: Run) -> PlannedEnsemble | None:
    """The ensemble that training began in this folder, which another device or limit of time does not change."""
    if not (run.folder / PLAN).is_file():
        return None
    content = read_json(run.folder / PLAN, max_bytes=MAX_PLAN, remedy="remove the file: the members are chosen again")
    try:
        return PlannedEnsemble(int(content["members"]), tuple(map(str, content["networks"])))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "it names no members", where=str(run.folder / PLAN), remedy="remove the file: the members are chosen again"
        ) from error


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
    if run.exists or (run.is_ensemble and not resume):
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


class InterruptedSearchError(Exception):
    """A signal ended a training."""

    def __init__(self, signal: int | None) -> None:
        super().__init__("interrupted")
        self.signal = signal


def successive_halving(
    variants: Sequence[Variant], evaluate: Callable[[Variant, float], float], shares: Sequence[float]
) -> list[Variant]:
    """The variants in the order in which they are best: after each share of the training the better half goes on.

    Higher values are better. Those that leave together are in the order of their values, and equal ones as given.
    """
    left, gone = list(variants), list[Variant]()
    for share in shares:
        if len(left) > 1:
            left = _ranked(left, evaluate, share)
            half = -(-len(left) // 2)
            left, gone = left[:half], [*left[half:], *gone]
    if len(left) > 1:
        left = _ranked(left, evaluate, shares[-1])
    return [*left, *gone]


def _ranked(variants: Sequence[Variant], evaluate: Callable[[Variant, float], float], share: float) -> list[Variant]:
    values = {one.name: evaluate(one, share) for one in variants}
    return sorted(variants, key=lambda one: -values[one.name])


@dataclass
class Search:
    """The trainings of one folder: each a run of its own, and a line of trials.jsonl."""

    run: Run
    table: TrainingTable
    criterion: str  # the metric that decides
    sign: int  # -1 where lower is better
    allow_changes: Sequence[str] = ()
    trials: list[dict[str, Any]] = field(default_factory=list)

    def value(self, scores: dict[str, float]) -> float:
        return self.sign * scores[self.criterion]

    def train(self, name: str, note: str, recipe: Recipe, folder: Path) -> dict[str, float]:
        """Development scores of a run, which is trained, resumed or, where it is finished, used again."""
        row = self.table.row(name, note)
        outcome = train_once(recipe, folder, row, self.allow_changes)
        if outcome is not None and outcome.reason == "interrupted":
            raise InterruptedSearchError(outcome.signal)
        run = Run(folder)
        scores = development_scores(run)
        row.finish(scores)
        updates = [entry for entry in read_log(run.log) if entry.get("kind") == "update"]
        self.trials.append(
            {
                "name": name,
                "note": note,
                "folder": folder.relative_to(self.run.folder).as_posix(),
                "scores": scores,
                "steps": run.metrics()["training"]["step"],
                "seconds": updates[-1]["seconds"] if updates else None,
                "parameters": run.metrics()["parameters"],
                "recipe": recipe.model_dump(mode="json"),
            }
        )
        replace_file(self.run.folder / "trials.jsonl", "".join(json_line(one) + "\n" for one in self.trials))
        return scores

    def trial(self, variant: Variant, share: float) -> float:
        """The development score of a variant after a share of its training."""
        folder = self.run.folder / "trials" / f"{re.sub(r'[^a-z0-9]+', '-', variant.name)}-{share:g}"
        return self.value(self.train(variant.name, f"{share:.1%}", shortened(variant.recipe, share), folder))


def train_best(
    recipe: Recipe,
    folder: str | Path,
    members: int,
    *,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    console: Console | None = None,
) -> EnsembleResult:
    """Searches a portfolio, trains the best networks in full, and keeps what is best on the development set.

    The recipe as it is takes part in the final comparison, so that the result is never worse on the development set.
    With `resume`, trainings that are finished are used again.
    """
    run, requested = Run(Path(folder)), resolve(recipe)
    check_folder(run, members, resume)
    requested = with_seed(requested, requested.training.seed)
    names = {metric_class(name).name: metric_class(name) for name in requested.evaluation.metrics}
    monitor = requested.training.monitor
    criterion = monitor if monitor in names else next(iter(names))
    with lock_run(run.folder, Processes()), TrainingTable(console or Console(quiet=True)) as table:
        search = Search(run, table, criterion, 1 if names[criterion].higher_is_better else -1, allow_changes)
        try:
            ranking = successive_halving(portfolio(requested), search.trial, SHARES)
            return _final_comparison(search, ranking[:NETWORKS], requested, members)
        except InterruptedSearchError as stopped:
            done = {f"{one['name']}, {one['note']}": one["scores"] for one in search.trials}
            return EnsembleResult(run, None, done, {}, stopped.signal)


def _final_comparison(search: Search, best_ones: Sequence[Variant], normal: Recipe, members: int) -> EnsembleResult:
    """The recipe as it was, the best networks and their ensemble, all trained in full: the best becomes the run.

    The members take turns among the networks; each round has another seed.
    """
    run, seed = search.run, normal.training.seed
    scores: dict[str, dict[str, float]] = {}
    folders = [run.folder / "members" / str(number) for number in range(1, members + 1)]
    choices = {f"member {number}": [own] for number, own in enumerate(folders, 1)}
    if best_ones[0].name != NORMAL:
        alone = run.folder / "normal"
        scores[NORMAL] = search.train(NORMAL, "in full", normal, alone)
        choices = {NORMAL: [alone], **choices}
    for number, own in enumerate(folders, 1):
        turn, one = divmod(number - 1, len(best_ones))
        recipe = with_seed(best_ones[one].recipe, seed + turn)
        name = f"member {number}"
        scores[name] = search.train(name, f"{best_ones[one].name}, seed {recipe.training.seed}", recipe, own)
    row = search.table.row("ensemble", f"{members} members")
    run.save_members(folders)
    model, evaluations = evaluate_ensemble(run, normal.training.device)
    together = {name: score.value for name, score in evaluations["dev"].scores.items()}
    row.finish(together)
    best = max(scores, key=lambda name: search.value(scores[name]))  # the first of equal ones
    if search.value(scores[best]) > search.value(together):
        run.save_members(choices[best])
        model, evaluations = evaluate_ensemble(run, normal.training.device)
    save_ensemble_metrics(run, model, evaluations, {**scores, "ensemble": together})
    return EnsembleResult(run, model, {**scores, "ensemble": together}, evaluations)
