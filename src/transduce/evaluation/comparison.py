"""Recipes and runs enter; one table, one picture and paired tests on the same held-out lines leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.build import build_reading
from transduce.contracts import Metric, TextMetric
from transduce.data.prepare import prepare_data
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError
from transduce.evaluation import evaluate as evaluation
from transduce.evaluation.contestants import (
    Candidate,
    Equal,
    check_data,
    equalise,
    limits,
    share_tokenizers,
    take,
    train_entrant,
)
from transduce.evaluation.scoring import Line, answer, as_lines, single_line
from transduce.evaluation.significance import SIGNIFICANT
from transduce.inference import load
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.training.report import read_log


@dataclass(frozen=True)
class Training:
    """How a model came to be, as far as its log tells; None where it does not."""

    updates: int | None
    minutes: float | None
    tokens_per_second: float | None  # the median of the log lines
    memory: int | None  # most bytes in use: of the GPU where there is one, else of the whole process


@dataclass(frozen=True)
class Speed:
    """Generation of all held-out lines, after a warm-up; None where no metric asked for any."""

    tokens_per_second: float | None
    sentences_per_second: float | None


@dataclass(frozen=True)
class System:
    name: str
    run: str
    parameters: int
    training: Training
    generation: Speed
    evaluation: evaluation.Evaluation


@dataclass(frozen=True)
class Contest:
    """The best system by a metric against one of the others: best minus other, and what that allows one to say."""

    metric: str
    best: str
    other: str
    result: evaluation.Paired
    verdict: str


@dataclass(frozen=True)
class Comparison:
    data: str  # which lines were held out
    lines: int
    systems: tuple[System, ...]
    contests: tuple[Contest, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _columns(comparison: Comparison) -> dict[str, list[str]]:
    """The table, column by column, ready to be shown."""
    systems = comparison.systems
    columns = {"name": [system.name for system in systems]}
    for metric, score in systems[0].evaluation.scores.items():
        scores = [system.evaluation.scores[metric] for system in systems]
        arrow = "↑" if score.higher_is_better else "↓"
        columns[f"{metric} {arrow} (95 %)"] = [f"{one.value:.2f} ({one.low:.2f}–{one.high:.2f})" for one in scores]
    told = [system.training for system in systems]
    return columns | {
        "parameters": [f"{system.parameters:,}" for system in systems],
        "updates": [_number(one.updates) for one in told],
        "training tokens/s": [_number(one.tokens_per_second) for one in told],
        "training minutes": [_number(one.minutes, ".1f") for one in told],
        "generation tokens/s": [_number(system.generation.tokens_per_second) for system in systems],
        "generation sentences/s": [_number(system.generation.sentences_per_second) for system in systems],
        "peak MB": [_number(None if one.memory is None else one.memory / 1e6) for one in told],
    }


def _number(value: float | None, form: str = ",.0f") -> str:
    return "–" if value is None else format(value, form)


def draw_table(comparison: Comparison, console: Console) -> None:
    """One column a system, which fits a terminal, and below what the paired tests say."""
    (_, names), *rows = _columns(comparison).items()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for what, cells in rows:
        table.add_row(what, *map(escape, cells))
    console.print(f"{comparison.lines:,} lines: {comparison.data}", markup=False, highlight=False)
    console.print(table)
    for line in _sentences(comparison):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sentences(comparison: Comparison) -> list[str]:
    """A verdict that names no winner does not say whom it is about."""
    return [
        f"{one.metric}: " + (f"{one.best} and {one.other}: " if one.result.p >= SIGNIFICANT else "") + one.verdict
        for one in comparison.contests
    ]


def to_markdown(comparison: Comparison) -> str:
    columns = _columns(comparison)
    rows = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *map(list, zip(*columns.values(), strict=True))]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    tests = [f"- {sentence}" for sentence in _sentences(comparison)]
    head = f"{comparison.lines:,} lines: {comparison.data}"
    picture = ["![quality by source length](compare.png)", ""] if comparison.systems[0].evaluation.by_length else []
    return "\n".join([head, "", *table, "", *tests, "", *picture])


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
        examples = [example for corpus in corpora for example in read_corpus(corpus, settings.data.invalid)]
    else:
        name, examples = (
            f"the development set of {first.name}",
            prepare_data(settings, first.run.tokenizers()).dev_examples(),
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
        max((line["peak_memory"] for line in updates), default=0) or None,
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
        content = "".join(single_line(text) + "\n" for text in said.texts)
        (folder / f"{name}.txt").write_text(content, encoding="utf-8", newline="\n")
    numbers = json.dumps(comparison.to_json(), indent=2, ensure_ascii=False)
    (folder / "compare.json").write_text(numbers + "\n", encoding="utf-8")
    (folder / "compare.md").write_text(to_markdown(comparison), encoding="utf-8")
    metric = next(iter(comparison.systems[0].evaluation.by_length), None)
    if metric is None:  # models that read no source: there are no lengths to draw by
        return
    series = {system.name: system.evaluation.by_length[metric] for system in comparison.systems}
    evaluation.draw_by_length(series, folder / "compare.png", metric)
