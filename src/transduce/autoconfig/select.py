"""Recipe of a command: a recipe file, or a recipe chosen from a data file, with overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.autoconfig.statistics import look
from transduce.autoconfig.tasks import FORMS, INPUTS, TASKS
from transduce.data.readers.corpus import Invalid, read_corpus
from transduce.data.readers.formats import corpus_format
from transduce.errors import InputError, nearest
from transduce.interop import as_run
from transduce.recipe import Corpus, Recipe, load, override, parse
from transduce.run import Run


def recipe_for(source: str, overrides: Sequence[str] = (), task: str = "generate") -> Recipe:
    """A recipe file as it is, or the recipe chosen for a file of pairs; with `key=value` changes on top."""
    if Path(source).suffix in (".yaml", ".yml"):
        return load(source, overrides)
    changes = override({"data": {"train": source}}, overrides)
    chosen = _begun(choose(changes["data"], task).model_dump(mode="json"), changes.get("init"))
    return parse(override(chosen, overrides), where="key=value")


def choose(data: dict[str, Any], task: str = "generate") -> Recipe:
    """A whole recipe for the pairs in the `data` section."""
    if task not in TASKS:
        raise InputError(f"no task is called {task!r}", remedy=nearest(task, TASKS))
    parse({"data": data})  # what is wrong with it is told before anything is added
    stated, given = FORMS.get(task, {}), data.get("sources") or {}
    form = stated(data) if callable(stated) else stated
    sources = {name: {**_spec(spec), **_spec(given.get(name))} for name, spec in form.get("sources", {}).items()}
    data = {**form, **data}
    if sources or given:  # those of the task first, in its order, with what is said on top
        data["sources"] = {**sources, **{name: spec for name, spec in given.items() if name not in sources}}
    if task in INPUTS:
        data["train"] = _with_columns(data, INPUTS[task])
    told = parse({"data": data}).data
    seen = look(told.train, told.invalid)
    return parse({"data": data, **TASKS[task](seen)})


def _spec(given: Any) -> dict[str, Any]:
    """A source by its options; a plain name stands for its kind."""
    return {"kind": given} if isinstance(given, str) else dict(given or {})


def _with_columns(data: dict[str, Any], columns: int | None) -> list[dict[str, Any]]:
    """Corpora that do not say how many inputs they have, have these: what is held out follows them."""
    given = parse({"data": data}).data
    return [
        corpus.model_dump()
        if corpus.model_fields_set & {"source_columns", "columns"}
        else {**corpus.model_dump(), "source_columns": columns or _columns(corpus, given.invalid) - 1}
        for corpus in given.train
    ]


def _columns(corpus: Corpus, invalid: Invalid) -> int:
    """How many columns the first line of a TSV has; of another format, two."""
    first = next(read_corpus(corpus, invalid), None) if corpus_format(corpus) == "tsv" else None
    return 2 if first is None else 2 + len(first.extra)


def _begun(chosen: dict[str, Any], init: Any) -> dict[str, Any]:
    """The tokens and parts of the run that is begun from: weights are taken where both are the same."""
    given = init if isinstance(init, dict) else {}
    folder = given.get("model") or given.get("encoder")
    if not isinstance(folder, str):
        return chosen
    origin = Run(as_run(folder)).recipe()
    tokens = origin.tokens.model_dump(mode="json")
    # How the origin keeps its weights is its own affair: whether they can be begun from is told when they are read.
    model = {**origin.model.model_dump(mode="json"), "weight_dtype": "fp32"}
    if origin.data.format == "text":  # one vocabulary, that of its only side
        tokens = {**tokens, "source": tokens["target"], "shared": True}
    joined = given.get("model") is not None and chosen["model"]["head"] is None and model["decoder"] is not None
    if joined and model["encoder"] is not None:
        chosen = {**chosen, "tokens": tokens, "model": model}
        if tokens["source"]["kind"] == "given":  # imported: how it writes, and how far it reads, belong to its tokens
            chosen["generation"] = origin.generation.model_dump(mode="json")
            chosen["data"]["max_length"] = min(chosen["data"]["max_length"], origin.data.max_length)
        if origin.data.sources:  # how it perceives belongs to its weights
            chosen["data"]["sources"] = origin.model_dump(mode="json")["data"]["sources"]
        if model["ctc"] is None and chosen["training"]["objective"].get("kind") == "joint_ctc":
            chosen["training"]["objective"] = {}  # no rows of it spell
        return chosen
    if model["encoder"] is not None:
        chosen["model"]["encoder"], chosen["tokens"]["source"] = model["encoder"], tokens["source"]
        if chosen["data"]["format"] == "text":
            chosen["tokens"]["target"] = tokens["source"]
    return chosen
