"""What a comparison found, as values, as a table for the terminal, as Markdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce import evaluation
from transduce.evaluation.significance import SIGNIFICANT


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
