"""Recipes and runs enter; one table, one picture and paired tests on the same held-out lines leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console

from transduce import evaluation
from transduce.build import build_reading
from transduce.comparison.entrants import (
    Candidate,
    Equal,
    check_data,
    equalise,
    limits,
    share_tokenizers,
    take,
    train_entrant,
)
from transduce.comparison.results import Comparison, Contest, Speed, System, Training, draw_table, to_markdown
from transduce.contracts import Metric, TextMetric
from transduce.data.sources import read
from transduce.errors import InputError
from transduce.predict import load
from transduce.prepare import prepare
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.score import Line, answer, as_lines
from transduce.show import as_line
from transduce.training.report import read_log

__all__ = ["Comparison", "compare", "draw_table", "to_markdown"]

WARM_UP = 32  # lines generated before the clock runs


def compare(
    candidates: Sequence[str | Path],
    *,
    folder: str | Path,
    overrides: Sequence[str] = (),
    data: str | None = None,
    equal: Equal = "none",
    minutes: float | None = None,
    console: Console | None = None,
) -> Comparison:
    """Trains the recipes (into `folder/<name>`, going on where a run is there already), takes the runs as they are, and
    scores all on `data`, else on the test set of the first, else on the pairs it held out of training.

    The evaluation settings of the first count for all. An interruption while training raises KeyboardInterrupt; the
    same call goes on from there.
    """
    folder, console = Path(folder), console or Console(quiet=True)
    if equal == "minutes" and minutes is None:
        raise InputError("equal time, but how much?", remedy="give the minutes that each may train (--minutes 4)")
    entrants = take(candidates, folder, overrides, limits(equal, minutes))
    first = entrants[0]
    metrics = [evaluation.find(name) for name in first.recipe.evaluation.metrics]  # misspelt: known before training
    if data is None:
        check_data(entrants)
    share_tokenizers(entrants)
    if equal == "parameters":
        entrants = equalise(entrants)
    what, lines = _held_out(first, data)
    for entrant in entrants:
        train_entrant(entrant, console)
    # One tokenizer measures the sources for all: in the picture a length means the same for every system.
    lengths = None
    if any(line.source for line in lines):
        reading = build_reading(first.recipe, first.run.tokenizers())
        lengths = reading.lengths([line.source for line in lines])
    device = next((entrant.recipe.training.device for entrant in entrants if not entrant.given), "auto")
    systems, outputs = [], dict[str, evaluation.Outputs]()
    for entrant in entrants:
        said, model_size, speed = _answer(entrant, lines, first.recipe, device)
        scores = _score(said, lines, lengths, first.recipe)
        systems.append(System(entrant.name, str(entrant.run.folder), model_size, _training(entrant.run), speed, scores))
        outputs[entrant.name] = said
    contests = [one for metric in metrics for one in _contests(metric, systems, outputs, lines, first.recipe)]
    comparison = Comparison(what, len(lines), tuple(systems), tuple(contests))
    _write(comparison, outputs, folder)
    return comparison


def _held_out(first: Candidate, data: str | None) -> tuple[str, list[Line]]:
    settings = first.recipe
    corpora = settings.data.test if data is None else settings.data.held_out(data)
    if corpora:
        name = f"the test set of {first.name}" if data is None else data
        examples = [example for corpus in corpora for example in read(corpus, settings.data.invalid)]
    else:
        name, examples = (
            f"the development set of {first.name}",
            prepare(settings, first.run.tokenizers()).dev_examples(),
        )
    return name, as_lines(examples, settings.evaluation)


def _answer(
    entrant: Candidate, lines: Sequence[Line], recipe: Recipe, device: str
) -> tuple[evaluation.Outputs, int, Speed]:
    """Outputs, parameters and speed: each by its own search settings, in batches of the same size."""
    model = load(entrant.run.folder, device=device, own_parts=not entrant.given)
    metrics = recipe.evaluation.metrics
    others = [name for name in metrics if not issubclass(evaluation.METRICS[name], TextMetric)]
    if len(others) == len(metrics) or model.recipe.data.noise is not None:  # nothing is written for the lines as such
        return answer(model, lines, metrics), model.parameters, Speed(None, None)
    sources, batch_tokens = [line.source for line in lines], recipe.generation.batch_tokens
    model.generate(sources[:WARM_UP], batch_tokens=batch_tokens)
    began = time.perf_counter()
    found = model.generate(sources, batch_tokens=batch_tokens)
    seconds = time.perf_counter() - began
    speed = Speed(sum(len(one.tokens) for one in found) / seconds, len(found) / seconds)
    outputs = replace(answer(model, lines, others), texts=[one.text for one in found])
    return outputs, model.parameters, speed


def _score(
    said: evaluation.Outputs, lines: Sequence[Line], lengths: list[int] | None, recipe: Recipe
) -> evaluation.Evaluation:
    settings = recipe.evaluation
    references = [line.references for line in lines]
    return evaluation.evaluate(said, references, lengths, settings.metrics, settings.resamples)


def _training(run: Run) -> Training:
    log = read_log(run.log) if run.log.is_file() else []
    updates = [line for line in log if line.get("kind") == "update"]
    return Training(
        max((line["step"] for line in log), default=None),
        updates[-1]["seconds"] / 60 if updates else None,
        median(line["tokens_per_second"] for line in updates) if updates else None,
        max((line["memory"] for line in updates), default=0) or None,
    )


def _contests(
    metric: Metric,
    systems: Sequence[System],
    outputs: Mapping[str, evaluation.Outputs],
    lines: Sequence[Line],
    recipe: Recipe,
) -> Iterator[Contest]:
    """The best by this metric against each of the others, on the same lines."""
    references = [line.references for line in lines]
    statistics = {name: evaluation.statistics_of(metric, said, references) for name, said in outputs.items()}
    sign = 1 if metric.higher_is_better else -1
    best = max(systems, key=lambda system: sign * system.evaluation.scores[metric.name].value).name
    for other in outputs:
        if other != best:
            resamples = recipe.evaluation.resamples
            result = evaluation.paired(metric, statistics[best], statistics[other], resamples, seed=1)
            yield Contest(metric.name, best, other, result, evaluation.verdict(result, (best, other)))


def _write(comparison: Comparison, outputs: Mapping[str, evaluation.Outputs], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, said in outputs.items():
        if said.texts is None:
            continue
        content = "".join(as_line(text) + "\n" for text in said.texts)
        (folder / f"{name}.txt").write_text(content, encoding="utf-8", newline="\n")
    numbers = json.dumps(comparison.to_json(), indent=2, ensure_ascii=False)
    (folder / "compare.json").write_text(numbers + "\n", encoding="utf-8")
    (folder / "compare.md").write_text(to_markdown(comparison), encoding="utf-8")
    metric = next(iter(comparison.systems[0].evaluation.by_length), None)
    if metric is None:  # models that read no source: there are no lengths to draw by
        return
    series = {system.name: system.evaluation.by_length[metric] for system in comparison.systems}
    evaluation.draw_by_length(series, folder / "compare.png", metric)
