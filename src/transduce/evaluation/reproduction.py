"""Reproduction of a row of the scoreboard: one training per seed and part, its evaluation, and the record."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import transduce
from transduce.autoconfig import recipe_for
from transduce.data.filters import recipe_leakage
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError
from transduce.evaluation.evaluate import SystemOutput, evaluate, find_metric, line_statistics
from transduce.evaluation.held_out import HeldOutExample, group_references, predict
from transduce.evaluation.scoreboard import Row, find_row
from transduce.inference import Model
from transduce.inference import load as load_model
from transduce.parsing import read_json
from transduce.recipe import Recipe, load, parse
from transduce.run import Run
from transduce.storage import make_folder, replace_file
from transduce.training.ensemble_run import NORMAL, portfolio
from transduce.training.experiment import train
from transduce.training.report import read_log
from transduce.transfer.synthetic_pairs import student_recipe

QUICK_UPDATES, QUICK_LINES = 8, 40
Report = Callable[[str], None]


@dataclass(frozen=True)
class Reproduction:
    """A row, the folder with its data, and where runs and record go. `quick`: a few updates, and no record to keep."""

    name: str
    data: Path
    runs: Path = Path("runs/scoreboard")
    records: Path = Path("scoreboard")
    recipes: Path = Path("recipes")
    quick: bool = False

    @property
    def row(self) -> Row:
        return find_row(self.name)

    @property
    def record_file(self) -> Path:
        return self.runs / f"{self.name}-quick.json" if self.quick else self.records / f"{self.name}.json"

    def recipe(self, part: str, seed: int) -> Recipe:
        """The recipe of one training: that of the row, or of one of its networks."""
        name = self.network(seed)
        if name.endswith(".yaml"):
            return self.row_recipe(part, seed, name)
        recipe = self.row_recipe(part, seed, self.row.recipe)
        return recipe if not name else next(one.recipe for one in portfolio(recipe) if one.name == name)

    def network(self, seed: int) -> str:
        """The name of the network that is trained with a seed, the same for a member of every ensemble of the row."""
        networks, member = self.row.networks, (seed - 1) % self.row.ensemble
        return networks[member % len(networks)] if networks else ""

    def row_recipe(self, part: str, seed: int, name: str) -> Recipe:
        """The recipe of this name for the data, with the settings and metrics of the row."""
        place = self.runs / self._shared / "data" / part
        files = self.row.prepare(self.data, place, part)
        settings = [setting.replace("{data}", str(self.data.absolute())) for setting in self.row.settings]
        kind, _, task = name.partition(" ")
        if kind == "task":
            held_out = [f"data.{name}={file}" for name, file in files.items() if name != "train"]
            recipe = recipe_for(files["train"], [*held_out, *settings], task)
        else:
            recipe = load(
                self._recipe_file(kind), [*settings, *(f"data.{name}={file}" for name, file in files.items())]
            )
        others = (one for one in recipe.evaluation.metrics if one not in self.row.metrics)
        metrics = [*self.row.metrics, *others]
        changes: dict[str, Any] = {"training": {"seed": seed}, "evaluation": {"metrics": metrics}}
        if self.quick:
            changes["training"] |= {"steps": QUICK_UPDATES, "validate_every": QUICK_UPDATES, "validate_examples": 20}
            changes["training"]["checkpoint_every"] = QUICK_UPDATES
        return _changed(recipe, changes)

    @property
    def _shared(self) -> str:
        """The folder of the runs: an ensemble shares the members of the row that it is an ensemble of."""
        return self.row.shares or self.name

    def members(self, seed: int) -> list[int]:
        """The seeds of the models of one output."""
        return list(range((seed - 1) * self.row.ensemble + 1, seed * self.row.ensemble + 1))

    def _recipe_file(self, name: str) -> Path:
        path = self.recipes / name
        if not path.is_file():
            remedy = "the recipes are in the source repository: run there, or give --recipes FOLDER"
            raise InputError("no such recipe", where=str(path), remedy=remedy)
        return path

    def run_folder(self, part: str, seed: int) -> Path:
        name = re.sub(r"[^a-z0-9]+", "-", self.network(seed).removesuffix(".yaml"))
        network = "" if name in ("", NORMAL) else f"{name}-"
        return self.runs / self._shared / ("quick" if self.quick else "full") / part / f"{network}seed-{seed}"


def _changed(recipe: Recipe, changes: Mapping[str, Mapping[str, Any]]) -> Recipe:
    content = recipe.model_dump(mode="json")
    return parse({**content, **{section: {**content[section], **keys} for section, keys in changes.items()}})


def reproduce(task: Reproduction, seeds: int, report: Report = print, pool: Executor | None = None) -> dict[str, Any]:
    """Trains what the record lacks, seed by seed, and writes the record after each. Returns the record.

    With a pool of processes, trainings run at the same time. Then the minutes of the record are longer than those of
    one training alone.
    """
    record = _begin(task)
    missing = [seed for seed in range(1, seeds + 1) if str(seed) not in record["seeds"]]
    if pool is not None:
        train_at_once(pool, task, missing)
    begun = {(seed, part): _begin_result(pool, task, part, seed) for seed in missing for part in task.row.parts}
    for seed in range(1, seeds + 1):
        if seed not in missing:
            report(f"seed {seed}: in the record")
            continue
        results = {}
        for part in task.row.parts:
            results[part] = begun[seed, part]()
            scores = ", ".join(f"{name} {score['value']:.4g}" for name, score in results[part]["scores"].items())
            report(f"seed {seed}{f', {part}' if part else ''}: {scores}")
        record["seeds"][str(seed)] = results
        record |= _summary(task.row, record["seeds"])
        record["margins"] = [
            {"system": system, "metric": metric, "points": points}
            for system, metric, points in margins(task.row, record)
        ]
        make_folder(task.record_file.parent)
        replace_file(task.record_file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def train_at_once(pool: Executor, task: Reproduction, seeds: Sequence[int]) -> None:
    """Trains all models of these seeds, one in each process, so that the members of an ensemble share no process."""
    trainings = [
        pool.submit(train_member, task, part, member)
        for seed in seeds
        for part in task.row.parts
        for member in task.members(seed)
    ]
    for one in trainings:
        one.result()


def _begin_result(pool: Executor | None, task: Reproduction, part: str, seed: int) -> Callable[[], dict[str, Any]]:
    """A function that returns the result of a seed and part, which a process of the pool begins now."""
    if pool is None:
        return lambda: one_result(task, part, seed)
    return pool.submit(one_result, task, part, seed).result


def _begin(task: Reproduction) -> dict[str, Any]:
    """The record so far if it is of the same recipes and version; else an empty one."""
    row = task.row
    content = {part: recipe_content(task, part) for part in row.parts}
    known = read_json(task.record_file, max_bytes=2**26) if task.record_file.is_file() else None
    begun = {"content": content, "version": transduce.__version__}
    begun |= {"networks": list(row.networks)} if row.networks else {}
    begun |= {"teacher": row.teacher} if row.teacher else {}
    if isinstance(known, dict) and all(known.get(key) == value for key, value in begun.items()):
        return known
    return {
        "row": task.name,
        "recipe": row.recipe,
        "settings": list(row.settings),
        **begun,
        "quick": task.quick,
        "hardware": _hardware(),
        "seeds": {},
    }


def recipe_content(task: Reproduction, part: str) -> dict[str, Any]:
    """What the recipe of a part says, without defaults, seed and files: a new key of recipes changes no record."""
    content = task.row_recipe(part, 0, task.row.recipe).model_dump(mode="json", exclude_defaults=True)
    for files in ("train", "dev", "test"):
        content["data"].pop(files, None)
    content["training"].pop("seed", None)
    return json.loads(json.dumps(content).replace(str(task.data.absolute()), "{data}"))


def _hardware() -> str:
    """In general terms: the kind of device, and the number of threads of a CPU."""
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name(0)}"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def one_result(task: Reproduction, part: str, seed: int) -> dict[str, Any]:
    """Trains, or continues, one model (an ensemble: its members) and evaluates it on the test set."""
    row, folders = task.row, trained_members(task, part, seed)
    trained = time.monotonic()
    model = load_model(folders if len(folders) > 1 else folders[0])
    recipe = task.recipe(part, task.members(seed)[0])
    leakage = recipe_leakage(recipe.data)
    found = _scores(task, model, recipe)
    _check_size(row, model)
    metrics = [Run(folder).metrics() for folder in folders]
    return {
        **found,
        "parameters": model.parameters,
        "updates": [one["training"]["step"] for one in metrics],
        "minutes": round((sum(map(_training_seconds, folders)) + time.monotonic() - trained) / 60, 2),
        "leakage": None if leakage is None else leakage.to_json(),
    }


def _training_seconds(folder: Path) -> float:
    return max((event["seconds"] for event in read_log(folder / "log.jsonl") if "seconds" in event), default=0.0)


def trained_members(task: Reproduction, part: str, seed: int) -> list[Path]:
    """The runs of one output, after training those that are missing."""
    return [train_member(task, part, member) for member in task.members(seed)]


def train_member(task: Reproduction, part: str, member: int) -> Path:
    """The run of one model, which is trained, or its training continued, unless it is finished."""
    folder = task.run_folder(part, member)
    if Run(folder).metrics():
        return folder
    recipe = training_recipe(task, part, member)
    if task.row.teacher:
        teachers = trained_members(replace(task, name=task.row.teacher), part, seed=1)
        names, console = ",".join(map(str, teachers)), Console(quiet=True)
        settings = [*task.row.settings, f"training.seed={recipe.training.seed}"]
        recipe = student_recipe(names, folder, "word", None, settings, console)
    outcome = train(recipe, folder, resume=True).outcome
    if outcome.reason == "interrupted":
        raise InputError(
            f"the training was interrupted after update {outcome.step}",
            where=str(folder),
            remedy="run the same command again: it continues there",
        )
    return folder


def training_recipe(task: Reproduction, part: str, seed: int) -> Recipe:
    """The recipe without its test set, which is evaluated once, after training."""
    recipe = task.recipe(part, seed)
    data: dict[str, Any] = {"test": []}
    if task.quick and recipe.data.test:
        data |= {"dev": [], "dev_size": 20}
    return _changed(recipe, {"data": data})


def _check_size(row: Row, model: Model) -> None:
    if row.parameters is not None and model.parameters > row.parameters:
        problem = f"{model.parameters:,} parameters, and the published system has at most {row.parameters:,}"
        raise InputError(problem, where=row.recipe, remedy="make the model smaller")


def _scores(task: Reproduction, model: Model, recipe: Recipe) -> dict[str, Any]:
    """Scores on the test set, or on the development set without one; scores by kind where the row has kinds."""
    corpora = recipe.data.test or recipe.data.dev
    examples = [example for corpus in corpora for example in read_corpus(corpus, recipe.data.invalid)]
    examples = examples[:QUICK_LINES] if task.quick else examples
    lines = group_references(examples, recipe.evaluation)
    metrics = task.row.metrics
    output = predict(model, lines, metrics)
    evaluation = evaluate(output, [line.references for line in lines], None, metrics)
    result: dict[str, Any] = {
        "lines": evaluation.count,
        "scores": {
            name: {"value": one.value, "low": one.low, "high": one.high} for name, one in evaluation.scores.items()
        },
        "signatures": {name: one.signature for name, one in evaluation.scores.items()},
    }
    if task.row.kind_column:
        kinds = [example.extra.get(task.row.kind_column, "") for example in examples]
        result["by_kind"] = score_by_kind(metrics[0], output.texts or (), lines, kinds)
    return result


def score_by_kind(
    metric: str, texts: Sequence[str], lines: Sequence[HeldOutExample], kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The score of the lines of each kind, and their number."""
    scores = {}
    for kind in sorted(set(kinds)):
        rows = [row for row, one in enumerate(kinds) if one == kind]
        measure, output = find_metric(metric), SystemOutput([texts[row] for row in rows])
        chosen = line_statistics(measure, output, [lines[row].references for row in rows])
        scores[kind] = {"value": measure.value(chosen.sum(0)), "lines": len(rows)}
    return scores


def _summary(row: Row, seeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of the mean over the parts."""
    scores = {}
    for metric in row.metrics:
        values = [
            statistics.fmean(one["scores"][metric]["value"] for one in parts.values()) for parts in seeds.values()
        ]
        spread = statistics.stdev(values) if len(values) > 1 else None
        scores[metric] = {"mean": statistics.fmean(values), "spread": spread, "seeds": values}
    return {"scores": scores}


def margins(row: Row, record: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """For each published figure: system, metric, and how many points the record is better (negative: worse)."""
    for published in row.published:
        for metric, value in published.scores.items():
            if metric in record["scores"]:
                better = 1 if find_metric(metric).higher_is_better else -1
                yield published.system, metric, better * (record["scores"][metric]["mean"] - value)
