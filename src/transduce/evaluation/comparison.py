"""Comparison of systems on the same held-out data: candidates, their training, table, plot, paired tests."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.contracts import Metric, TextMetric
from transduce.data.prepare import Tokenizers, prepare_data, train_tokenizers
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError, check_path
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
from transduce.recipe import ModelRecipe, Recipe, build, registry
from transduce.recipe import load as load_recipe
from transduce.recipe.build import build_source_encoding, meta_device
from transduce.run import Run
from transduce.storage import replace_file, single_line, staged_folder
from transduce.training.experiment import is_finished, train
from transduce.training.report import read_log
from transduce.training.resolve import resolve

PARAMETER_TOLERANCE = 0.03  # relative difference of parameter counts that count as equal
WARM_UP_LINES = 32  # generated before the time is measured


def count_parameters(model: ModelRecipe, source_size: int, target_size: int) -> int:
    with meta_device():
        return build.count_parameters(build.build_model(model, source_size, target_size))


def match_parameters(model: ModelRecipe, target: int, source_size: int, target_size: int) -> ModelRecipe:
    """The same model with other widths, and `ff_width` in proportion, so that it has about `target` parameters.

    All widths are multiples of one step, so that equal widths stay equal and heads have an even width. If that is too
    coarse, `ff_width` alone is changed to come closer.
    """
    step = math.lcm(2, *(2 * heads for heads in _options(model, "heads")))
    widest, max_ff_width = max(_options(model, "width")), max(_options(model, "ff_width"), default=0)

    def size(changed: ModelRecipe) -> int:
        return count_parameters(changed, source_size, target_size)

    def by_width(number: int) -> ModelRecipe:
        return _resize(model, number * step / widest, number * step / widest, step)

    number = _nearest_size(lambda n: size(by_width(n)), target)
    chosen = by_width(number)
    if max_ff_width and abs(size(chosen) - target) > PARAMETER_TOLERANCE * target:

        def by_ff_width(n: int) -> ModelRecipe:
            return _resize(model, number * step / widest, 2 * n / max_ff_width, step)

        chosen = by_ff_width(_nearest_size(lambda n: size(by_ff_width(n)), target))
    return chosen


def _options(part: Any, name: str) -> Iterator[int]:
    """All values of an option of this name, in nested parts too."""
    content = part.model_dump() if isinstance(part, ModelRecipe) else part
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from [value] if key == name else _options(value, name)


def _resize(model: ModelRecipe, width: float, ff_width: float, step: int) -> ModelRecipe:
    """Model and feed-forward widths times these factors, rounded to whole steps."""

    def resize(spec: Any) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        new = {key: resize(value) for key, value in spec.items()}
        if "width" in new:
            new["width"] = step * max(1, round(new["width"] * width / step))
        if "ff_width" in new:
            new["ff_width"] = 2 * max(1, round(new["ff_width"] * ff_width / 2))
        return new

    return model.model_copy(update={name: resize(getattr(model, name)) for name in ("encoder", "decoder", "head")})


def _nearest_size(count: Callable[[int], int], target: int) -> int:
    """The positive number whose count, an increasing function, is nearest to the target."""
    high = 1
    while count(high) < target:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < target else (low, middle)
    return min((low, high), key=lambda number: abs(count(number) - target))


Equal = Literal["none", "parameters", "minutes"]


@dataclass(frozen=True)
class Candidate:
    """One system of a comparison: an existing run, or a recipe and the run to train."""

    name: str
    run: Run
    recipe: Recipe  # completed
    is_run: bool  # an existing run, neither trained nor resized


def time_limits(equal: Equal, minutes: float | None) -> list[str]:
    """Recipe overrides. Equal time excludes early stopping; the schedule still follows the number of updates."""
    overrides = [] if minutes is None else [f"training.minutes={minutes}"]
    return [*overrides, "training.patience=null"] if equal == "minutes" else overrides


def load_candidates(paths: Sequence[str | Path], folder: Path, overrides: Sequence[str]) -> list[Candidate]:
    """Run directories as they are, recipes with the overrides; names are made unique."""
    if not paths:
        raise InputError("nothing to compare", remedy="give recipes and run directories")
    candidates: dict[str, Candidate] = {}
    for path in map(Path, paths):
        is_run = path.is_dir()
        base = path.resolve().name if is_run else path.stem
        names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(paths) + 1))
        name = next(name for name in names if name not in candidates)
        run = Run(path if is_run else folder / name)
        recipe = run.recipe() if is_run else resolve(load_recipe(path, overrides))
        if is_run and (own := registry.user_classes(recipe)):  # code of a run directory is not executed
            raise InputError(
                f"this run uses Python code of the user: {', '.join(own)}", where=str(path), remedy="give its recipe"
            )
        candidates[name] = Candidate(name, run, recipe, is_run)
    return list(candidates.values())


def check_data(candidates: Sequence[Candidate]) -> None:
    """Raises an error if the held-out data of one candidate could be training data of another."""
    first, *others = candidates
    split = not (first.recipe.data.test or first.recipe.data.dev)  # the split also depends on the seed and tokens
    for other in others:
        pairs = [(f"data.{key}", value, getattr(other.recipe.data, key)) for key, value in first.recipe.data]
        if split:
            pairs.append(("training.seed", first.recipe.training.seed, other.recipe.training.seed))
            pairs.append(("tokens", first.recipe.tokens, other.recipe.tokens))
        differing = [key for key, a, b in pairs if a != b and key not in ("data.test", "data.cache")]
        if differing:
            raise InputError(
                f"{first.name} and {other.name} differ in {', '.join(differing)}: "
                "held-out data of one may be training data of the other",
                remedy="train both on the same data, or give held-out pairs that neither was trained on (--data FILE)",
            )


def share_tokenizers(candidates: Sequence[Candidate]) -> None:
    """Saves the tokenizers of every new run; equal settings on equal data share tokenizers, trained once."""
    known: dict[str, Tokenizers] = {}
    for candidate in sorted(candidates, key=lambda one: not one.run.exists):  # existing tokenizers are reused
        recipe, run = candidate.recipe, candidate.run
        key = repr((recipe.data.train, recipe.data.invalid, recipe.tokens))
        if run.exists:
            known.setdefault(key, run.tokenizers())
            continue
        known[key] = known.get(key) or train_tokenizers(recipe)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.save_tokenizers(*known[key])


def equalise_parameters(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Resizes the recipes to the number of parameters of the first candidate."""
    first, *others = candidates
    sizes = [tuple(tokenizer.size for tokenizer in one.run.tokenizers()) for one in candidates]
    parameters = count_parameters(first.recipe.model, *sizes[0])
    result = [first]
    for other, (source, target) in zip(others, sizes[1:], strict=True):
        if not other.is_run:
            model = match_parameters(other.recipe.model, parameters, source, target)
            other = replace(other, recipe=other.recipe.model_copy(update={"model": model}))
        result.append(other)
    return result


def train_candidate(candidate: Candidate, console: Console) -> None:
    """Trains a recipe unless its run is finished."""
    if candidate.is_run or is_finished(candidate.run, candidate.recipe):
        console.print(f"{candidate.name}: using the run in {candidate.run.folder}", markup=False, highlight=False)
        return
    console.print(f"{candidate.name}: training", markup=False, highlight=False)
    _reset_peak_memory()
    outcome = train(candidate.recipe, candidate.run.folder, resume=True, console=console).outcome
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt(f"training of {candidate.name} was interrupted after update {outcome.step}")


def _reset_peak_memory() -> None:
    """Resets the peak memory of the process, so that it does not include earlier training runs."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # not Linux, or not permitted: later numbers are upper bounds then
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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
