"""Recipe selection: the recipe of a command, from a file or from statistics of the data, with overrides."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.autoconfig.hints import check_targets, hints
from transduce.autoconfig.sizes import PlannedEnsemble, TimeBudget, ensemble_for, separate
from transduce.autoconfig.statistics import CorpusStatistics, corpus_statistics
from transduce.autoconfig.tasks import DATA_SECTIONS, MONOTONIC_TASKS, SOURCE_COLUMNS, TASK_RECIPES, inflection_data
from transduce.data.readers.corpus import Invalid, name_columns, read_corpus
from transduce.data.readers.files import corpus_format
from transduce.errors import InputError, nearest
from transduce.interop import as_run
from transduce.recipe import Corpus, Recipe, changed_keys, load, override, parse
from transduce.run import Run
from transduce.training.distributed import computes_in_bf16, pick_device

GIVEN = "given on the command line, or by the run in init"
NETWORK_SETTINGS = ("training.batch_tokens", "training.optimiser", "training.objective")  # of each network its own
__all__ = ["Plan", "choose", "continued_recipe", "plan_for", "recipe_for"]


@dataclass(frozen=True)
class Plan:
    """A recipe that was chosen, the reasons for its values by their keys, and what was seen of the data."""

    recipe: Recipe
    reasons: dict[str, str]
    statistics: CorpusStatistics
    budget: TimeBudget
    ensemble: PlannedEnsemble | None = None  # what the command `train` trains; None: one network

    @property
    def text_pairs(self) -> bool:
        """Whether the recipe is for pairs of texts, or for texts with labels, whose time random tokens measure."""
        data, model = self.recipe.data, self.recipe.model
        labels = model.head is None or model.head["kind"] in ("classifier", "tagger")
        return data.format == "pairs" and not data.sources and labels

    @property
    def tokens(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Estimated vocabulary size and tokens a line, of the source and of the target."""
        tokens = self.recipe.tokens
        return (
            self.statistics.source.tokens(tokens.source.kind, tokens.source.size),
            self.statistics.target.tokens(tokens.target.kind, tokens.target.size),
        )


def recipe_for(
    source: str, overrides: Sequence[str] = (), task: str = "generate", minutes: float | None = None
) -> Recipe:
    """The recipe in a YAML file, or one chosen for a data file; then the overrides."""
    if Path(source).suffix in (".yaml", ".yml"):
        time = [] if minutes is None else [f"training.minutes={minutes}"]
        return load(source, [*time, *overrides])
    return plan_for(source, overrides, task, minutes).recipe


def continued_recipe(run: Run, source: str, overrides: Sequence[str], minutes: float | None = None) -> Recipe | None:
    """The recipe of an unfinished run on this data file, with the overrides; None where there is no such run.

    A recipe is chosen for a device and a size of the data, which may have changed since the run began: its own decides.
    """
    if not run.exists or Path(source).suffix in (".yaml", ".yml"):
        return None
    saved = run.recorded_recipe()
    given = parse({"data": {"train": source}}, where="key=value").data.train
    files = [
        [(one.path, one.source, one.target) for one in map(Corpus.absolute, them)] for them in (given, saved.data.train)
    ]
    if files[0] != files[1]:
        return None
    limits = [] if minutes is None else [f"training.minutes={minutes}"]
    return parse(override(saved.model_dump(mode="json"), [*limits, *overrides]), where="key=value")


def plan_for(source: str, overrides: Sequence[str] = (), task: str = "generate", minutes: float | None = None) -> Plan:
    """The recipe chosen for a data file and the device, changed by the overrides, with its reasons."""
    changes = override({"data": {"train": source}}, overrides)
    given = changes.get("training")
    given = given if isinstance(given, dict) else {}
    keys = {key: given[key] for key in ("device", "minutes", "precision") if key in given}
    training = parse({"training": {"precision": "auto", **keys}}, where="key=value").training
    device = pick_device(training.device)
    bf16 = device.type == "cpu" and training.precision != "fp32" and computes_in_bf16(device)
    budget = TimeBudget(device.type, training.minutes or minutes, bf16)
    plan = choose(changes["data"], task, budget)
    chosen = _with_pretrained_parts(plan.recipe.model_dump(mode="json"), changes.get("init"))
    recipe = parse(override(chosen, overrides), where="key=value")
    changes = changed_keys(plan.recipe, recipe)
    changed = [key for key, (_, new) in changes.items() if new is not None and not key.startswith("data.")]
    kept = {
        key: reason
        for key, reason in plan.reasons.items()
        if not any(f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in changed)
    }
    ensemble = _kept_ensemble(plan.ensemble, changed)
    return Plan(recipe, {**kept, **dict.fromkeys(changed, GIVEN)}, plan.statistics, plan.budget, ensemble)


def _kept_ensemble(chosen: PlannedEnsemble | None, changed: Sequence[str]) -> PlannedEnsemble | None:
    """What is left of a chosen ensemble after these keys of the recipe were changed.

    With a network, tokens or weights that were given there is one network. Networks of several kinds have training
    settings of their own: where these were given, all members are of the first kind.
    """
    if chosen is None or any(key.startswith(("model.", "tokens.", "init.")) for key in changed):
        return None
    one_kind = any(key.startswith(NETWORK_SETTINGS) for key in changed)
    return replace(chosen, networks=chosen.networks[:1]) if one_kind else chosen


def choose(data: dict[str, Any], task: str = "generate", budget: TimeBudget | None = None) -> Plan:
    """A complete recipe for the corpora of a `data` section, with its reasons."""
    if task not in TASK_RECIPES:
        raise InputError(f"there is no task {task!r}", remedy=nearest(task, TASK_RECIPES))
    section = parse({"data": data}).data  # reports errors of the section before anything is added
    if task not in DATA_SECTIONS:  # pairs of texts
        for corpus in section.train:
            check_targets(corpus)
    data, table = inflection_data(data, task)
    if table and task == "generate":
        task = "inflect"
        warnings.warn(f"{table} (--task inflect)", stacklevel=3)
    data = {**_saved_splits(data["train"]), **data}
    stated, given = DATA_SECTIONS.get(task, {}), data.get("sources") or {}
    form = stated(data) if callable(stated) else stated
    sources = {name: {**_spec(spec), **_spec(given.get(name))} for name, spec in form.get("sources", {}).items()}
    data = {**form, **data}
    if sources or given:  # those of the task first, in its order, with the given options
        data["sources"] = {**sources, **{name: spec for name, spec in given.items() if name not in sources}}
    if task in SOURCE_COLUMNS:
        data["train"] = _with_columns(data, SOURCE_COLUMNS[task])
    parsed = parse({"data": data}).data
    if (named := [name_columns(corpus) for corpus in parsed.train]) != list(parsed.train):
        data["train"] = [corpus.model_dump(exclude_unset=True) for corpus in named]
        parsed = parse({"data": data}).data
    statistics = corpus_statistics(parsed.train, parsed.invalid)
    for hint in hints(parsed.train, parsed.invalid, statistics, task):
        warnings.warn(hint, stacklevel=3)
    budget = budget or TimeBudget()
    chosen, reasons = separate(TASK_RECIPES[task](statistics, budget))
    for key, value in chosen.pop("data", {}).items():  # what is given wins
        merged = {**value, **data[key]} if isinstance(data.get(key), dict) else data.get(key, value)
        if merged != value:
            reasons.pop(f"data.{key}", None)
        data[key] = merged
    if table:
        reasons["data.sources"] = table
    ensemble = ensemble_for(statistics.pairs, budget) if task in MONOTONIC_TASKS else None
    return Plan(parse({"data": data, **chosen}), reasons, statistics, budget, ensemble)


def _saved_splits(train: Any) -> dict[str, str]:
    """The development and test splits beside the training split of a saved `DatasetDict`."""
    if not isinstance(train, str) or not (Path(train) / "dataset_dict.json").is_file():
        return {}
    folders = {"dev": Path(train) / "validation", "test": Path(train) / "test"}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir()}


def _spec(given: Any) -> dict[str, Any]:
    """A source as a mapping; a plain name is its kind."""
    return {"kind": given} if isinstance(given, str) else dict(given or {})


def _with_columns(data: dict[str, Any], columns: int | None) -> list[dict[str, Any]]:
    """Training corpora with the number of source columns, where they do not state it."""
    given = parse({"data": data}).data
    return [
        corpus.model_dump()
        if corpus.model_fields_set & {"source_columns", "columns"}
        else {**corpus.model_dump(), "source_columns": columns or _columns(corpus, given.invalid) - 1}
        for corpus in given.train
    ]


def _columns(corpus: Corpus, invalid: Invalid) -> int:
    """Number of columns of the first row of a TSV or CSV; two for other formats."""
    first = next(read_corpus(corpus, invalid), None) if corpus_format(corpus) in ("tsv", "csv") else None
    return 2 if first is None else 2 + len(first.extra)


def _with_pretrained_parts(chosen: dict[str, Any], init: Any) -> dict[str, Any]:
    """Takes over the tokens and parts of the run in `init`: weights are initialised where both agree."""
    given = init if isinstance(init, dict) else {}
    folder = given.get("model") or given.get("encoder")
    if not isinstance(folder, str):
        return chosen
    origin = Run(as_run(folder)).recipe()
    tokens = origin.tokens.model_dump(mode="json")
    # Weights stored in 8 bits are reported as an error when they are loaded.
    model = {**origin.model.model_dump(mode="json"), "weight_dtype": "fp32"}
    if origin.data.format == "text":  # one vocabulary, that of its only side
        tokens = {**tokens, "source": tokens["target"], "shared": True}
    joined = given.get("model") is not None and chosen["model"]["head"] is None and model["decoder"] is not None
    if joined and model["encoder"] is not None:
        chosen = {**chosen, "tokens": tokens, "model": model}
        if tokens["source"]["kind"] == "given":  # imported: search settings and lengths belong to its tokens
            chosen["generation"] = origin.generation.model_dump(mode="json")
            chosen["data"]["max_length"] = min(chosen["data"]["max_length"], origin.data.max_length)
        if origin.data.sources:  # the preprocessing belongs to the weights
            chosen["data"]["sources"] = origin.model_dump(mode="json")["data"]["sources"]
        if model["ctc"] is None and chosen["training"]["objective"].get("kind") == "joint_ctc":
            chosen["training"]["objective"] = {}  # it has no CTC layer
        return chosen
    if model["encoder"] is not None:
        chosen["model"]["encoder"], chosen["tokens"]["source"] = model["encoder"], tokens["source"]
        if chosen["data"]["format"] == "text" or chosen["tokens"]["shared"]:
            chosen["tokens"]["target"] = tokens["source"]
        if tokens["source"]["kind"] == "given":  # imported: its positions end
            chosen["data"]["max_length"] = min(chosen["data"]["max_length"], origin.data.max_length)
            chosen["model"]["scale_embedding"] = model["scale_embedding"]
            chosen["model"]["source_eos"] = model["source_eos"]
        if given.get("model") and (model["head"] or {}).get("kind") == (chosen["model"]["head"] or {}).get("kind"):
            chosen["model"]["head"] = model["head"]
    return chosen
