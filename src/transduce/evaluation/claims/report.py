"""Reports of claims: records, figures, tables in the terminal, a self-contained HTML page, Markdown."""

from __future__ import annotations

import html
import io
import json
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import transduce
from transduce.evaluation.claims.claim import Budget, Cell, Check, Claim, ClaimTable, Measurement, Panel, Series
from transduce.explain.png import new_figure
from transduce.parsing import read_json
from transduce.storage import atomic_path, make_folder, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b5bdb", "#e8590c", "#2b8a3e", "#ae3ec9", "#0c8599", "#c92a2a", "#f08c00", "#5f3dc4")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH, HEIGHT, ACROSS = 4.6, 3.4, 3  # inches of a panel, and panels in a row
MAX_RECORD = 16 * 2**20  # bytes
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
svg { max-width: 100%; height: auto } table { border-collapse: collapse; margin: 1rem 0; font-size: 0.85rem }
th, td { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd } th:first-child, td:first-child
{ text-align: left } .holds { color: #2b8a3e } .fails { color: #c92a2a } .pale { color: #777; font-size: 0.85rem }
"""


def draw(panels: Sequence[Panel]) -> Figure:
    """All panels of a claim, at most three in a row."""
    columns = 2 if len(panels) == 4 else min(len(panels), ACROSS)
    rows = -(-len(panels) // columns)
    figure = new_figure(WIDTH * columns, HEIGHT * rows)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        {"line": _lines, "bar": _bars, "points": _points, "heat": _heat}[panel.kind](axes, panel)
        axes.set_title(panel.title, loc="left", fontsize=9, color="#222222")
        axes.set_xlabel(panel.x_label, fontsize=8)
        axes.set_ylabel(panel.y_label, fontsize=8)
        axes.tick_params(labelsize=6 if panel.kind == "heat" or len(panel.series[0].x) > 8 else 7, which="both")
    return figure


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """The figure as a PNG file. Equal panels give equal bytes."""
    with atomic_path(path) as part:
        draw(panels).savefig(part, format="png", dpi=110, metadata={"Software": None})


def svg(panels: Sequence[Panel]) -> str:
    """The figure as an SVG element. Letters are paths, so that no font is needed."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "transduce"}):
        draw(panels).savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _lines(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import NullLocator

    solid = sum(not series.dashed for series in panel.series)
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % solid % len(COLOURS)]  # dashed curves come last and repeat the colours
        style: dict[str, Any] = {"color": colour, "linewidth": 1.0 if series.dashed else 1.6, "markersize": 3.5}
        marker = "" if series.dashed else MARKERS[number % len(MARKERS)]
        if len(series.low):
            axes.fill_between(
                np.asarray(series.x, float), series.low, series.high, color=colour, alpha=0.15, linewidth=0
            )
        axes.plot(
            series.x, series.y, "--" if series.dashed else "-", marker=marker, label=series.label or None, **style
        )
    if panel.log_x:
        axes.set_xscale("log")
        ticks = sorted({float(x) for series in panel.series for x in series.x})
        axes.set_xticks(ticks if len(ticks) <= 6 else ticks[:: len(ticks) // 4])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
    _finish(axes, panel)


def _bars(axes: Axes, panel: Panel) -> None:
    width = 0.8 / max(len(panel.series), 1)
    names = [str(name) for name in panel.series[0].x]
    for number, series in enumerate(panel.series):
        places = np.arange(len(names)) + (number - (len(panel.series) - 1) / 2) * width
        axes.bar(places, series.y, width, color=COLOURS[number % len(COLOURS)], label=series.label)
        if len(series.low):
            axes.vlines(places, series.low, series.high, color="#222222", linewidth=1)
    turned: dict[str, Any] = {"rotation": 90} if len(names) > 8 else {"rotation": 15} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    _finish(axes, panel)


def _points(axes: Axes, panel: Panel) -> None:
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % len(COLOURS)]
        axes.scatter(np.asarray(series.x, float), series.y, s=12, color=colour, label=series.label)
        for x, y, name in zip(series.x, series.y, series.names, strict=False):
            axes.annotate(name, (float(x), y), fontsize=5, color=colour, xytext=(2, 2), textcoords="offset points")
    _finish(axes, panel)


def _heat(axes: Axes, panel: Panel) -> None:
    drawn = axes.imshow(np.array([series.y for series in panel.series]), cmap="Blues", aspect="auto", vmin=0)
    labels = [str(name) for name in panel.series[0].x]
    axes.set_xticks(range(len(labels)), labels, fontsize=6, rotation=90 if max(map(len, labels)) > 2 else 0)
    axes.set_yticks(range(len(panel.series)), [series.label for series in panel.series], fontsize=6)
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)


def _finish(axes: Axes, panel: Panel) -> None:
    if panel.log_y:
        axes.set_yscale("log")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if _named(panel.series):
        axes.legend(frameon=False, fontsize=6.5)


def _named(series: Sequence[Series]) -> bool:
    return any(one.label for one in series)


@dataclass(frozen=True)
class ClaimRecord:
    """A measurement with the settings that it was made with."""

    claim: str
    settings: Mapping[str, Any]
    seconds: float
    processor_seconds: float
    environment: Mapping[str, str]
    measurement: Measurement

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "holds": self.measurement.holds, "measurement": self.measurement.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ClaimRecord:
        kept = {name: value for name, value in content.items() if name != "holds"}
        return cls(**{**kept, "measurement": Measurement.from_json(content["measurement"])})


def read_record(path: Path) -> ClaimRecord:
    return ClaimRecord.from_json(read_json(path, max_bytes=MAX_RECORD, remedy="remove the file and measure again"))


def measure(claim: Claim, budget: Budget) -> ClaimRecord:
    """Measures a claim and writes its record and its figure, unless the folder has them for these settings."""
    path, settings = budget.folder / f"{claim.name}.json", settings_of(claim, budget)
    if path.is_file() and (record := read_record(path)).settings == settings:
        budget.report("kept from an earlier run")
        return record
    torch.manual_seed(budget.seed)
    wall, processor = time.perf_counter(), time.process_time()
    measurement = claim.measure(budget)
    seconds = (round(time.perf_counter() - wall, 1), round(time.process_time() - processor, 1))
    environment = {"transduce": transduce.__version__, "torch": torch.__version__, "machine": machine(budget.device)}
    record = ClaimRecord(claim.name, settings, *seconds, environment, measurement)
    make_folder(budget.folder)
    save_png(measurement.panels, budget.folder / f"{claim.name}.png")
    # Read back, so that a new record and a kept one are the same.
    content = json.dumps(record.to_json(), ensure_ascii=False, indent=1)
    replace_file(path, content + "\n")
    return ClaimRecord.from_json(json.loads(content))


def machine(device: str) -> str:
    """The kind of processor: of a GPU, its name."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name(None if device in ("auto", "cuda") else torch.device(device))
    return platform.machine()


def settings_of(claim: Claim, budget: Budget) -> dict[str, Any]:
    """What a record must agree in to be used again."""
    given = {"data": budget.data and budget.data.name, "model": budget.model and Path(budget.model).name}
    used = {name: value for name, value in given.items() if name in claim.takes and value is not None}
    return {"quick": budget.quick, "seed": budget.seed, "device": budget.device, **used}


def cell(value: Cell) -> str:
    """A value for people: three significant digits, thousands separated."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else value


def show(claim: Claim, record: ClaimRecord, console: Console) -> None:
    """Prints tables, checks and verdict."""
    console.print(f"\n[bold]{claim.name}[/]  {escape(claim.statement)}", highlight=False)
    console.print(f"[dim]{escape(claim.source)}[/]", highlight=False)
    for one in record.measurement.tables:
        table = Table(*one.columns, title=one.title or None, title_justify="left", box=None, header_style="bold")
        for row in one.rows:
            table.add_row(*(escape(cell(value)) for value in row))
        console.print(table)
    for check in record.measurement.checks:
        mark = "[green]✓[/]" if check.holds else "[red]✗[/]"
        console.print(f"{mark} {escape(check.statement)} ({escape(_numbers(check))})", highlight=False, soft_wrap=True)


def _numbers(check: Check) -> str:
    return ", ".join(f"{name} {cell(value)}" for name, value in check.numbers.items())


def verdict(measurement: Measurement) -> str:
    failed = sum(not check.holds for check in measurement.checks)
    return "holds" if not failed else f"{failed} of {len(measurement.checks)} checks do not hold"


def settings_text(record: ClaimRecord) -> str:
    settings = ", ".join(f"{name} {cell(value)}" for name, value in record.settings.items())
    environment = ", ".join(f"{name} {value}" for name, value in record.environment.items())
    return f"{settings}; {record.processor_seconds:.0f} processor seconds without models that were kept; {environment}"


def html_page(measured: Sequence[tuple[Claim, ClaimRecord]]) -> str:
    """A page with all figures. It loads nothing: its security policy allows only its own style and pictures."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    links = " · ".join(f'<a href="#{claim.name}">{claim.name}</a>' for claim, _ in measured)
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Claims, measured</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head><body>',
        f"<h1>Claims, measured</h1><p>{links}</p>",
        *(_html_section(claim, record) for claim, record in measured),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _html_section(claim: Claim, record: ClaimRecord) -> str:
    measurement = record.measurement
    state = "holds" if measurement.holds else "fails"
    checks = "".join(
        f'<li class="{"holds" if check.holds else "fails"}">{html.escape(f"{check.statement}: {_numbers(check)}")}</li>'
        for check in measurement.checks
    )
    return "\n".join(
        [
            f'<h2 id="{claim.name}">{claim.name}: <span class="{state}">{verdict(measurement)}</span></h2>',
            f"<p><b>{html.escape(claim.statement)}</b> <i>{html.escape(claim.source)}</i></p>",
            svg(measurement.panels),
            f"<ul>{checks}</ul>",
            *map(_html_table, measurement.tables),
            f"<p>{html.escape(claim.method)}</p>",
            f'<p class="pale">{html.escape(settings_text(record))}</p>',
        ]
    )


def _html_table(table: ClaimTable) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = ("".join(f"<td>{html.escape(cell(value))}</td>" for value in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h3>{html.escape(table.title)}</h3><table><tr>{head}</tr>{body}</table>"


def markdown(claim: Claim, record: ClaimRecord, others: Sequence[ClaimRecord] = ()) -> str:
    """The page of a claim for the documentation; its figure is NAME.png beside it.

    `others` are records of other machines, of which the page shows the tables that differ.
    """
    measurement = record.measurement
    options = [f"--{name}" for name in ("quick",) if record.settings.get(name)]
    options += [f"--{name} {record.settings[name]}" for name in ("data", "model") if name in record.settings]
    title = claim.name.capitalize().replace("-", " ")
    lines = [f"# {title}", "", f"> {claim.statement}", "", f"{claim.source}.", "", claim.method]
    lines += ["", "```sh", f"transduce claims {claim.name} {' '.join(options)}".rstrip(), "```"]
    lines += ["", f"![{claim.statement}]({claim.name}.png)", "", f"The claim, as measured: **{verdict(measurement)}**."]
    lines += ["", *(f"- {'✓' if one.holds else '✗'} {one.statement}: {_numbers(one)}" for one in measurement.checks)]
    for table in measurement.tables:
        lines += ["", *([f"## {table.title}", ""] if table.title else []), *_markdown_table(table)]
    lines += ["", f"Record: {settings_text(record)}."]
    for other in others:
        different = [table for table in other.measurement.tables if table not in measurement.tables]
        lines += ["", f"## On one {other.environment['machine']}: {verdict(other.measurement)}"]
        for table in different:
            lines += ["", *([f"### {table.title}", ""] if table.title else []), *_markdown_table(table)]
        lines += ["", f"Record: {settings_text(other)}."]
    return "\n".join(lines) + "\n"


def _markdown_table(table: ClaimTable) -> list[str]:
    rows = [[cell(value).replace("|", "\\|").replace("<", "&lt;") for value in row] for row in table.rows]
    lines = [list(table.columns), ["---", *["---:"] * (len(table.columns) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
