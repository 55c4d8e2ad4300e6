"""Comparison of systems on the same held-out data: table, plot, paired tests."""

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

from transduce.build import build_source_encoding
from transduce.contracts import Metric, TextMetric
from transduce.data.prepare import prepare_data
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError, check_path
from transduce.evaluation.candidates import (
    Candidate,
    Equal,
    check_data,
    equalise_parameters,
    load_candidates,
    share_tokenizers,
    time_limits,
    train_candidate,
)
from transduce.evaluation.evaluate import (
    Evaluation,
    SystemOutput,
    draw_by_length,
    evaluate,
    find_metrics,
    line_statistics,
    metric_class,
)
from transduce.evaluation.held_out import HeldOutExample, group_references, predict, sources_for
from transduce.evaluation.significance import SIGNIFICANCE_LEVEL, PairedTestResult, paired_bootstrap, verdict
from transduce.inference import load
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.storage import replace_file, single_line, staged_folder
from transduce.training.report import read_log

WARM_UP_LINES = 32  # generated before the time is measured


@dataclass(frozen=True)
class TrainingCost:
    """Training numbers from the log of a run; None if the log lacks them."""

    updates: int | None
    minutes: float | None
    tokens_per_second: float | None  # median of the log entries
    peak_memory: int | None  # bytes: of the GPU where there is one, else of the process


@dataclass(frozen=True)
class GenerationSpeed:
    """Speed of generation for all held-out lines, after a warm-up; None if no metric needs generated text."""

    tokens_per_second: float | None
    sentences_per_second: float | None


@dataclass(frozen=True)
class System:
    """The results of one candidate."""

    name: str
    run: str
    parameters: int
    training: TrainingCost
    generation: GenerationSpeed
    evaluation: Evaluation


@dataclass(frozen=True)
class SystemTest:
    """Paired test of the best system by a metric against one of the others: best minus other."""

    metric: str
    best: str
    other: str
    result: PairedTestResult
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The results of all candidates on the same lines."""

    data: str  # name of the held-out data
    lines: int
    systems: tuple[System, ...]
    tests: tuple[SystemTest, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    """Trains the recipes in `folder/<name>`, or resumes them, and scores all recipes and runs on the same data.

    The data is `data`, else the test set of the first candidate, else its development set. The evaluation settings of
    the first candidate apply to all. An interruption of training raises KeyboardInterrupt; the same call continues.
    """
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise InputError("compare takes a list of recipes and runs", remedy='write compare(["a.yaml", "runs/b"], ...)')
    for path in (*candidates, folder):
        check_path("compare", path)
    folder, console = Path(folder), console or Console(quiet=True)
    if equal == "minutes" and minutes is None:
        raise InputError("--equal minutes needs a time", remedy="give the training time of each (--minutes 4)")
    entries = load_candidates(candidates, folder, [*overrides, *time_limits(equal, minutes)])
    first = entries[0]
    metrics = find_metrics(first.recipe.evaluation.metrics)  # unknown names fail before training
    if data is None:
        check_data(entries)
    share_tokenizers(entries)
    if equal == "parameters":
        entries = equalise_parameters(entries)
    name, examples = _load_held_out(first, data)
    for candidate in entries:
        train_candidate(candidate, console)
    systems, outputs = _evaluate_all(entries, examples)
    tests = [test for metric in metrics for test in _paired_tests(metric, systems, outputs, examples, first.recipe)]
    comparison = Comparison(name, len(examples), tuple(systems), tuple(tests))
    _write(comparison, outputs, folder)
    return comparison


def _load_held_out(first: Candidate, data: str | None) -> tuple[str, list[HeldOutExample]]:
    settings = first.recipe
    corpora = settings.data.test if data is None else settings.data.held_out(data)
    if corpora:
        name = f"the test set of {first.name}" if data is None else data
        examples = [example for corpus in corpora for example in read_corpus(corpus, settings.data.invalid)]
    else:
        name = f"the development set of {first.name}"
        examples = prepare_data(settings, first.run.tokenizers()).dev_examples()
    return name, group_references(examples, settings.evaluation)


def _evaluate_all(
    candidates: Sequence[Candidate], examples: Sequence[HeldOutExample]
) -> tuple[list[System], dict[str, SystemOutput]]:
    first = candidates[0]
    lengths = None
    if any(example.source for example in examples):
        # Lengths are those of the first tokenizer, so that the buckets of all systems are the same.
        source_encoding = build_source_encoding(first.recipe, first.run.tokenizers())
        lengths = source_encoding.lengths([example.source for example in examples])
    references = [example.references for example in examples]
    settings = first.recipe.evaluation
    device = next((one.recipe.training.device for one in candidates if not one.is_run), "auto")
    systems, outputs = [], dict[str, SystemOutput]()
    for candidate in candidates:
        output, parameters, speed = _generate(candidate, examples, first.recipe, device)
        scores = evaluate(output, references, lengths, settings.metrics, settings.resamples)
        cost = _training_cost(candidate.run)
        systems.append(System(candidate.name, str(candidate.run.folder), parameters, cost, speed, scores))
        outputs[candidate.name] = output
    return systems, outputs


def _generate(
    candidate: Candidate, examples: Sequence[HeldOutExample], recipe: Recipe, device: str
) -> tuple[SystemOutput, int, GenerationSpeed]:
    """Output, parameters and speed: with the candidate's own search settings, in batches of the same size."""
    model = load(candidate.run.folder, device=device, trust_user_code=not candidate.is_run)
    metrics = recipe.evaluation.metrics
    others = [name for name in metrics if not issubclass(metric_class(name), TextMetric)]
    if len(others) == len(metrics) or model.recipe.data.noise is not None:  # no text is generated from the sources
        return predict(model, examples, metrics), model.parameters, GenerationSpeed(None, None)
    sources, batch_tokens = sources_for(model, examples), recipe.generation.batch_tokens
    model.generate(sources[:WARM_UP_LINES], batch_tokens=batch_tokens)
    started = time.perf_counter()
    predictions = model.generate(sources, batch_tokens=batch_tokens)
    seconds = time.perf_counter() - started
    speed = GenerationSpeed(sum(len(one.tokens) for one in predictions) / seconds, len(predictions) / seconds)
    output = replace(predict(model, examples, others), texts=[one.text for one in predictions])
    return output, model.parameters, speed


def _training_cost(run: Run) -> TrainingCost:
    log = read_log(run.log) if run.log.is_file() else []
    updates = [entry for entry in log if entry.get("kind") == "update"]
    return TrainingCost(
        max((entry["step"] for entry in log), default=None),
        updates[-1]["seconds"] / 60 if updates else None,
        median(entry["tokens_per_second"] for entry in updates) if updates else None,
        max((entry["peak_memory"] for entry in updates), default=0) or None,
    )


def _paired_tests(
    metric: Metric,
    systems: Sequence[System],
    outputs: Mapping[str, SystemOutput],
    examples: Sequence[HeldOutExample],
    recipe: Recipe,
) -> Iterator[SystemTest]:
    """Tests the best system by this metric against each of the others."""
    references = [example.references for example in examples]
    statistics = {name: line_statistics(metric, output, references) for name, output in outputs.items()}
    sign = 1 if metric.higher_is_better else -1
    best = max(systems, key=lambda system: sign * system.evaluation.scores[metric.name].value).name
    for other in outputs:
        if other != best:
            resamples = recipe.evaluation.resamples
            result = paired_bootstrap(metric, statistics[best], statistics[other], resamples, seed=1)
            yield SystemTest(metric.name, best, other, result, verdict(result, (best, other)))


def _write(comparison: Comparison, outputs: Mapping[str, SystemOutput], folder: Path) -> None:
    numbers = json.dumps(comparison.to_json(), indent=2, ensure_ascii=False)
    metric = next(iter(comparison.systems[0].evaluation.by_length), None)
    with staged_folder(folder) as part:
        for name, output in outputs.items():
            if output.texts is not None:
                replace_file(part / f"{name}.txt", "".join(single_line(text) + "\n" for text in output.texts))
        replace_file(part / "compare.json", numbers + "\n")
        replace_file(part / "compare.md", to_markdown(comparison))
        if metric is not None:  # models without a source have no source lengths
            series = {system.name: system.evaluation.by_length[metric] for system in comparison.systems}
            draw_by_length(series, part / "compare.png", metric)


def _columns(comparison: Comparison) -> dict[str, list[str]]:
    """The columns of the table as text."""
    systems = comparison.systems
    columns = {"name": [system.name for system in systems]}
    for metric, score in systems[0].evaluation.scores.items():
        scores = [system.evaluation.scores[metric] for system in systems]
        arrow = "↑" if score.higher_is_better else "↓"
        columns[f"{metric} {arrow} (95 %)"] = [f"{one.value:.2f} ({one.low:.2f}–{one.high:.2f})" for one in scores]
    costs = [system.training for system in systems]
    return columns | {
        "parameters": [f"{system.parameters:,}" for system in systems],
        "updates": [_number(one.updates) for one in costs],
        "training tokens/s": [_number(one.tokens_per_second) for one in costs],
        "training minutes": [_number(one.minutes, ".1f") for one in costs],
        "generation tokens/s": [_number(system.generation.tokens_per_second) for system in systems],
        "generation sentences/s": [_number(system.generation.sentences_per_second) for system in systems],
        "peak MB": [_number(None if one.peak_memory is None else one.peak_memory / 1e6) for one in costs],
    }


def _number(value: float | None, format_spec: str = ",.0f") -> str:
    return "–" if value is None else format(value, format_spec)


def draw_table(comparison: Comparison, console: Console) -> None:
    """Prints the table, one column for each system, and the paired tests below."""
    (_, names), *rows = _columns(comparison).items()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for label, cells in rows:
        table.add_row(label, *map(escape, cells))
    console.print(f"{comparison.lines:,} lines: {comparison.data}", markup=False, highlight=False)
    console.print(table)
    for line in _test_sentences(comparison):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _test_sentences(comparison: Comparison) -> list[str]:
    """The verdicts; one without a better system does not name the systems, so they are added."""
    return [
        f"{test.metric}: "
        + (f"{test.best} and {test.other}: " if test.result.p_value >= SIGNIFICANCE_LEVEL else "")
        + test.verdict
        for test in comparison.tests
    ]


def to_markdown(comparison: Comparison) -> str:
    columns = _columns(comparison)
    rows = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *map(list, zip(*columns.values(), strict=True))]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    tests = [f"- {sentence}" for sentence in _test_sentences(comparison)]
    head = f"{comparison.lines:,} lines: {comparison.data}"
    plot = ["![score by source length](compare.png)", ""] if comparison.systems[0].evaluation.by_length else []
    return "\n".join([head, "", *table, "", *tests, "", *plot])
