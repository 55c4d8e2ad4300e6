"""Recipes and runs enter; one table, one picture and paired tests on the same held-out lines leave."""

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

from transduce import build, evaluation
from transduce.contracts import Metric
from transduce.data.batching import Position
from transduce.data.sources import read
from transduce.errors import InputError
from transduce.evaluation.significance import SIGNIFICANT
from transduce.experiment import _as_recipe as settle
from transduce.experiment import train
from transduce.predict import load
from transduce.prepare import Tokenizers, prepare, train_tokenizers
from transduce.recipe import ModelRecipe, Recipe, parse
from transduce.recipe import load as load_recipe
from transduce.run import Run
from transduce.score import Line, as_lines
from transduce.show import as_line
from transduce.training.loop import fingerprint
from transduce.training.report import read_log

Equal = Literal["none", "parameters", "minutes"]
CLOSE = 0.03  # parameter counts that differ by less are called equal
WARM_UP = 32  # lines generated before the clock runs


@dataclass(frozen=True)
class Candidate:
    """What takes part: a run as it is, or a recipe and the run that is made of it."""

    name: str
    run: Run
    recipe: Recipe  # completed
    given: bool  # a run directory: neither trained nor resized


@dataclass(frozen=True)
class Training:
    """How a model came to be, as far as its log tells; None where it does not."""

    updates: int | None
    minutes: float | None
    tokens_per_second: float | None  # the median of the log lines
    memory: int | None  # most bytes in use: of the GPU where there is one, else of the whole process


@dataclass(frozen=True)
class Speed:
    """Generation of all held-out lines, after a warm-up."""

    tokens_per_second: float
    sentences_per_second: float


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
    entrants = _take(candidates, folder, overrides, _limits(equal, minutes))
    first = entrants[0]
    metrics = [evaluation.find(name) for name in first.recipe.evaluation.metrics]  # misspelt: known before training
    if data is None:
        _check_data(entrants)
    _share_tokenizers(entrants)
    if equal == "parameters":
        entrants = _equalise(entrants)
    what, lines = _held_out(first, data)
    for entrant in entrants:
        _train(entrant, console)
    # One tokenizer measures the sources for all: in the picture a length means the same for every system.
    lengths = [len(ids) for ids in first.run.tokenizers()[0].encode_batch([line.source for line in lines])]
    device = next((entrant.recipe.training.device for entrant in entrants if not entrant.given), "auto")
    systems, outputs = [], {}
    for entrant in entrants:
        texts, model_size, speed = _generate(entrant, lines, first.recipe.generation.batch_tokens, device)
        scores = _score(texts, lines, lengths, first.recipe)
        systems.append(System(entrant.name, str(entrant.run.folder), model_size, _training(entrant.run), speed, scores))
        outputs[entrant.name] = texts
    contests = [one for metric in metrics for one in _contests(metric, systems, outputs, lines, first.recipe)]
    comparison = Comparison(what, len(lines), tuple(systems), tuple(contests))
    _write(comparison, outputs, folder)
    return comparison


def _limits(equal: Equal, minutes: float | None) -> list[str]:
    """With equal time nobody leaves early. The number of updates stays: the learning rate is planned by it."""
    limits = [] if minutes is None else [f"training.minutes={minutes}"]
    return [*limits, "training.patience=null"] if equal == "minutes" else limits


def _take(
    candidates: Sequence[str | Path], folder: Path, overrides: Sequence[str], limits: list[str]
) -> list[Candidate]:
    if not candidates:
        raise InputError("nothing to compare", remedy="give recipes and run directories")
    taken: dict[str, Candidate] = {}
    for path in map(Path, candidates):
        given = path.is_dir()
        base = path.resolve().name if given else path.stem
        names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(candidates) + 1))
        name = next(name for name in names if name not in taken)
        run = Run(path if given else folder / name)
        recipe = run.recipe() if given else settle(load_recipe(path, [*overrides, *limits]))
        if given and (own := build.own_parts(recipe)):  # a run may come from anywhere: its code is not run
            raise InputError(
                f"this run needs code of its own: {', '.join(own)}", where=str(path), remedy="give its recipe"
            )
        taken[name] = Candidate(name, run, recipe, given)
    return list(taken.values())


def _check_data(entrants: Sequence[Candidate]) -> None:
    """Refuses where lines held out of one training could have been seen in another."""
    first, *others = entrants
    split = not (first.recipe.data.test or first.recipe.data.dev)  # which pairs are held out depends on more then
    for other in others:
        pairs = [(f"data.{key}", value, getattr(other.recipe.data, key)) for key, value in first.recipe.data]
        if split:
            pairs.append(("training.seed", first.recipe.training.seed, other.recipe.training.seed))
            pairs.append(("tokens", first.recipe.tokens, other.recipe.tokens))
        differing = [key for key, a, b in pairs if a != b and key not in ("data.test", "data.cache")]
        if differing:
            raise InputError(
                f"{first.name} and {other.name} differ in {', '.join(differing)}: "
                "what one held out the other may have been trained on",
                remedy="train both on the same data, or give held-out pairs that none of them has seen (--data FILE)",
            )


def _share_tokenizers(entrants: Sequence[Candidate]) -> None:
    """Gives every run its tokenizers. Equal settings on equal data have the same ones, trained once."""
    known: dict[str, Tokenizers] = {}
    for entrant in sorted(entrants, key=lambda one: not one.run.exists):  # those that have some lend them
        recipe, run = entrant.recipe, entrant.run
        key = repr((recipe.data.train, recipe.data.invalid, recipe.tokens))
        if run.exists:
            known.setdefault(key, run.tokenizers())
            continue
        known[key] = known.get(key) or train_tokenizers(recipe)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.save_tokenizers(*known[key])


def _equalise(entrants: Sequence[Candidate]) -> list[Candidate]:
    first, *others = entrants
    sizes = [tuple(tokenizer.size for tokenizer in one.run.tokenizers()) for one in entrants]
    wanted = count_parameters(first.recipe.model, *sizes[0])
    result = [first]
    for other, (source, target) in zip(others, sizes[1:], strict=True):
        if not other.given:
            model = match_parameters(other.recipe.model, wanted, source, target)
            other = replace(other, recipe=other.recipe.model_copy(update={"model": model}))
        result.append(other)
    return result


def count_parameters(model: ModelRecipe, source_size: int, target_size: int) -> int:
    with torch.device("meta"):  # shapes without numbers: no memory, no time
        return build.count_parameters(build.build_model(model, source_size, target_size))


def match_parameters(model: ModelRecipe, wanted: int, source_size: int, target_size: int) -> ModelRecipe:
    """The same model with other widths, and `hidden` in proportion, so that it has about `wanted` parameters.

    All widths are multiples of one step, so that equal ones stay equal and heads have an even width. Where that is too
    coarse, `hidden` leaves its proportion to come closer.
    """
    step = math.lcm(2, *(2 * heads for heads in _options(model, "heads")))
    widest, most = max(_options(model, "width")), max(_options(model, "hidden"), default=0)

    def size(changed: ModelRecipe) -> int:
        return count_parameters(changed, source_size, target_size)

    def by_width(number: int) -> ModelRecipe:
        return _resize(model, number * step / widest, number * step / widest, step)

    number = _nearest(lambda n: size(by_width(n)), wanted)
    chosen = by_width(number)
    if most and abs(size(chosen) - wanted) > CLOSE * wanted:

        def by_hidden(n: int) -> ModelRecipe:
            return _resize(model, number * step / widest, 2 * n / most, step)

        chosen = by_hidden(_nearest(lambda n: size(by_hidden(n)), wanted))
    return chosen


def _options(part: Any, name: str) -> Iterator[int]:
    """Every value of an option of this name, in the parts and in the parts of parts."""
    content = part.model_dump() if isinstance(part, ModelRecipe) else part
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from [value] if key == name else _options(value, name)


def _resize(model: ModelRecipe, width: float, hidden: float, step: int) -> ModelRecipe:
    """Widths and hidden widths times these factors, rounded to whole steps."""

    def resize(spec: Any) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        new = {key: resize(value) for key, value in spec.items()}
        if "width" in new:
            new["width"] = step * max(1, round(new["width"] * width / step))
        if "hidden" in new:
            new["hidden"] = 2 * max(1, round(new["hidden"] * hidden / 2))
        return new

    return model.model_copy(update={name: resize(getattr(model, name)) for name in ("encoder", "decoder", "head")})


def _nearest(count: Callable[[int], int], wanted: int) -> int:
    """The number from 1 on whose count, which grows with it, comes nearest."""
    high = 1
    while count(high) < wanted:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < wanted else (low, middle)
    return min((low, high), key=lambda number: abs(count(number) - wanted))


def _held_out(first: Candidate, data: str | None) -> tuple[str, list[Line]]:
    settings = first.recipe
    corpora = settings.data.test if data is None else parse({"data": {"test": data}}).data.test
    if corpora:
        name = f"the test set of {first.name}" if data is None else data
        examples = [example for corpus in corpora for example in read(corpus, settings.data.invalid)]
    else:
        name, examples = (
            f"the development set of {first.name}",
            prepare(settings, first.run.tokenizers()).dev_examples(),
        )
    return name, as_lines(examples, settings.evaluation)


def _train(entrant: Candidate, console: Console) -> None:
    if entrant.given or _is_finished(entrant):
        console.print(f"{entrant.name}: taken from {entrant.run.folder}", markup=False, highlight=False)
        return
    console.print(f"{entrant.name}: training", markup=False, highlight=False)
    _forget_peak()
    outcome = train(entrant.recipe, entrant.run.folder, resume=True, console=console).outcome
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt(f"training of {entrant.name} was interrupted after update {outcome.step}")


def _is_finished(entrant: Candidate) -> bool:
    """Trained to the end, by this recipe and on this data: files can change under one name."""
    run, recipe = entrant.run, entrant.recipe
    if not (run.exists and run.metrics() and (run.checkpoints.folder / "final").is_dir() and run.recipe() == recipe):
        return False
    tokenizers, newest = run.tokenizers(), run.checkpoints.latest(only=())
    begins = prepare(recipe, tokenizers).batches(recipe, tokenizers).at(Position())
    return newest is not None and newest.facts["identity"]["data"] == fingerprint(begins)


def _forget_peak() -> None:
    """The greatest use of memory is kept by the process: what one training used must not count for the next."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # not Linux, or not allowed: then later numbers are upper bounds
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _generate(
    entrant: Candidate, lines: Sequence[Line], batch_tokens: int, device: str
) -> tuple[list[str], int, Speed]:
    """Outputs, parameters and speed: each by its own search settings, in batches of the same size."""
    model = load(entrant.run.folder, device=device, own_parts=not entrant.given)
    sources = [line.source for line in lines]
    model.generate(sources[:WARM_UP], batch_tokens=batch_tokens)
    began = time.perf_counter()
    found = model.generate(sources, batch_tokens=batch_tokens)
    seconds = time.perf_counter() - began
    speed = Speed(sum(len(one.tokens) for one in found) / seconds, len(found) / seconds)
    return [one.text for one in found], model.parameters, speed


def _score(texts: Sequence[str], lines: Sequence[Line], lengths: list[int], recipe: Recipe) -> evaluation.Evaluation:
    settings = recipe.evaluation
    references = [line.references for line in lines]
    return evaluation.evaluate(texts, references, lengths, settings.metrics, settings.resamples)


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
    metric: Metric, systems: Sequence[System], outputs: Mapping[str, list[str]], lines: Sequence[Line], recipe: Recipe
) -> Iterator[Contest]:
    """The best by this metric against each of the others, on the same lines."""
    references = [line.references for line in lines]
    statistics = {name: metric.statistics(texts, references) for name, texts in outputs.items()}
    sign = 1 if metric.higher_is_better else -1
    best = max(systems, key=lambda system: sign * system.evaluation.scores[metric.name].value).name
    for other in outputs:
        if other != best:
            resamples = recipe.evaluation.resamples
            result = evaluation.paired(metric, statistics[best], statistics[other], resamples, seed=1)
            yield Contest(metric.name, best, other, result, evaluation.verdict(result, (best, other)))


def _write(comparison: Comparison, outputs: Mapping[str, list[str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in outputs.items():
        content = "".join(as_line(text) + "\n" for text in texts)
        (folder / f"{name}.txt").write_text(content, encoding="utf-8", newline="\n")
    numbers = json.dumps(comparison.to_json(), indent=2, ensure_ascii=False)
    (folder / "compare.json").write_text(numbers + "\n", encoding="utf-8")
    (folder / "compare.md").write_text(to_markdown(comparison), encoding="utf-8")
    metric = next(iter(comparison.systems[0].evaluation.by_length))
    series = {system.name: system.evaluation.by_length[metric] for system in comparison.systems}
    evaluation.draw_by_length(series, folder / "compare.png", metric)


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
    return "\n".join([head, "", *table, "", *tests, "", "![quality by source length](compare.png)", ""])
