"""Commands about data: inspect, and data, which generates synthetic data sets."""

from __future__ import annotations

import base64
import html as markup
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transduce.cli.options import Overrides, open_console, open_output
from transduce.errors import InputError
from transduce.storage import replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.autoconfig.inspection import Inspection, SetInspection


def data(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of a data set; without it, all names are listed.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of examples.")] = 2000,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same examples.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Test examples, whose words and names occur in no training set.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Output file, by default standard output; for a set with files, a folder.")
    ] = None,
) -> None:
    """Generate a synthetic data set as TSV.

    Examples:

        transduce data

        transduce data questions --count 8000 --output train.tsv

        transduce data questions --count 500 --held-out --output test.tsv

        transduce train train.tsv --task answer data.test=test.tsv

    Image, audio and video sets are written to a folder: the files, pairs.tsv, and the ground truth in truth.jsonl.

        transduce data shapes --count 3000 --output shapes

        transduce train shapes/pairs.tsv --task caption
    """
    from transduce.synthetic import SYNTHETIC, generate, write_files

    console = open_console()
    if name is None:
        for known, dataset in SYNTHETIC.items():
            needed = "".join(f" {setting}" for setting in dataset.settings)
            line = (
                f"[cyan]{known:<16}[/] --task {dataset.task:<15} {dataset.description}{needed and f' ({needed[1:]})'}"
            )
            console.print(line, highlight=False, soft_wrap=True)
        return
    if name in SYNTHETIC and SYNTHETIC[name].writes_files:
        if output is None:
            raise InputError(f"the sources of {name} are files", where="--output", remedy="give --output FOLDER")
        pairs = write_files(name, output, count, seed, held_out=held_out)
        console.print(f"{count:,} lines: {pairs}", highlight=False, soft_wrap=True)
        return
    with open_output(output, "") as stream:
        for example in generate(name, count, seed, held_out=held_out):
            stream.write(f"{example.source}\t{example.target}\n" if SYNTHETIC[name].columns else f"{example.target}\n")


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="DATA", help="Data file or SOURCE,TARGET text files, as `transduce train` reads.")
    ],
    settings: Overrides = None,
    columns: Annotated[
        str | None, typer.Option(metavar="SOURCE,TARGET", help="Columns by name or position. Default: found.")
    ] = None,
    task: Annotated[str, typer.Option(help="Task, as in `transduce train`.")] = "generate",
    json: Annotated[Path | None, typer.Option(help="Write everything that was found to this JSON file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the lengths.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with tables and picture.")] = None,
) -> None:
    """Inspect data before training: lengths, scripts, duplicates, overlap of sets, suspicious lines, chosen recipe.

    Lines that `train` would refuse are listed with their numbers.

    Examples:

        transduce inspect pairs.tsv

        transduce inspect train.tsv data.test=test.tsv --html report.html

        transduce inspect opus.jsonl --columns translation.de,translation.en --json report.json
    """
    import json as json_format

    from transduce.autoconfig import plan_for
    from transduce.autoconfig.inspection import inspect as inspect_data
    from transduce.cli.display import show_plan

    console = open_console()
    given = [*([] if columns is None else [f"data.columns={columns}"]), *(settings or [])]
    plan = plan_for(source, ["data.invalid=drop", *given], task)
    found = inspect_data(plan.recipe.data)
    if json is not None:
        content = {"data": source, **found.to_json(), "recipe": plan.recipe.model_dump(mode="json")}
        replace_file(json, json_format.dumps(content, indent=2, ensure_ascii=False) + "\n")
    picture = lengths_picture(found) if png is not None or html is not None else b""
    if png is not None:
        replace_file(png, picture)
    if html is not None:
        replace_file(html, inspection_page(source, found, picture))
    show_inspection(found, console)
    console.print("\n`transduce train` would choose:", highlight=False)
    show_plan(plan, None, console)


def show_inspection(found: Inspection, console: Console) -> None:
    """Prints the numbers of each set, the overlaps, and the suspicious lines with their places."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*_HEADINGS, box=None, pad_edge=False, header_style="bold")
    for row in _rows(found):
        table.add_row(*map(escape, row))
    console.print(table)
    for name, side, one in _sides(found):
        console.print(
            f"{name}, {side}, characters a line: {_sparkline(one.histogram)} {one.limit:.0f}", highlight=False
        )
    for line in _overlaps(found):
        console.print(line, highlight=False)
    for name, one in found.sets.items():
        for kind, problem in one.problems.items():
            console.print(f"{name}, {kind}: {problem.count:,}", style="yellow", highlight=False)
            for place in problem.places[:3]:
                text = f"    {place.file}:{place.line}  {place.text!r}"
                console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


_HEADINGS = ("set", "examples", "side", "median", "longest", "scripts", "suspicious lines")


def _sides(found: Inspection) -> list[tuple[str, str, Any]]:
    """Name of the set, name of the side, and its numbers."""
    both = [(name, side, getattr(one, side)) for name, one in found.sets.items() for side in ("source", "target")]
    return [row for row in both if row[2] is not None]


def _rows(found: Inspection) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, side, one in _sides(found):
        whole: SetInspection = found.sets[name]
        scripts = ", ".join(f"{script} {share:.0%}" for script, share in one.scripts.items() if share >= 0.005)
        problems = sum(problem.count for problem in whole.problems.values())
        rows.append(
            (name, f"{whole.examples:,}", side, f"{one.median:g}", f"{one.longest:,}", scripts, f"{problems:,}")
        )
    return rows


def _overlaps(found: Inspection) -> list[str]:
    return [
        f"overlap with the training data: {one.pairs:,} pairs, {one.sources:,} sources and {one.targets:,} targets "
        f"of the {one.examples:,} {name} examples"
        for name, one in found.overlap.items()
    ]


def _sparkline(counts: list[int]) -> str:
    """A histogram of one line."""
    most = max(counts) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in counts)


def lengths_picture(found: Inspection) -> bytes:
    """PNG: a histogram of the lengths of each set and side."""
    from matplotlib.figure import Figure

    sides = _sides(found)
    figure = Figure(figsize=(8, 1.8 * len(sides)), layout="constrained")
    for axes, (name, side, one) in zip(figure.subplots(len(sides), 1, squeeze=False)[:, 0], sides, strict=True):
        width = one.limit / len(one.histogram)
        axes.bar([width * (number + 0.5) for number in range(len(one.histogram))], one.histogram, width * 0.95)
        axes.set_ylabel(f"{name}, {side}")
        axes.axvline(one.median, color="tab:orange", linewidth=1)
    axes.set_xlabel("characters a line; the line marks the median, the last bar holds all longer lines")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def inspection_page(source: str, found: Inspection, picture: bytes) -> str:
    """A self-contained HTML page: the table, the picture, the suspicious lines."""
    cells = "".join(f"<tr>{''.join(f'<td>{markup.escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(found))
    head = "".join(f"<th>{name}</th>" for name in _HEADINGS)
    pixels = base64.b64encode(picture).decode()
    problems = "".join(
        f"<h2>{markup.escape(f'{name}, {kind}: {problem.count:,}')}</h2><ul>"
        + "".join(
            f"<li>{markup.escape(f'{one.file}:{one.line}')} <q>{markup.escape(one.text)}</q></li>"
            for one in problem.places
        )
        + "</ul>"
        for name, whole in found.sets.items()
        for kind, problem in whole.problems.items()
    )
    overlaps = "".join(f"<p>{markup.escape(line)}</p>" for line in _overlaps(found))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{markup.escape(source)}</title>"
        "<style>body{font-family:system-ui,sans-serif;max-width:60rem;margin:2rem auto}td,th{padding:.2rem .8rem;"
        "text-align:left}img{max-width:100%}</style>"
        f"<h1>{markup.escape(source)}</h1><table><tr>{head}</tr>{cells}</table>{overlaps}"
        f'<img alt="histograms of lengths" src="data:image/png;base64,{pixels}">{problems}</html>\n'
    )
