"""Commands that reproduce published results and measure claims of the literature: reproduce, claims."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transduce.cli.options import Device, open_console
from transduce.errors import InputError, nearest
from transduce.storage import replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.claims.claim import Claim


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Row of the scoreboard; see --list.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the files of the data set.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings with different seeds.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time, each in a process of its own.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few updates and lines, to see that everything runs; no record is kept.")
    ] = False,
    list_rows: Annotated[
        bool, typer.Option("--list", help="List the rows, their files and published figures.")
    ] = False,
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("scoreboard"),
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/scoreboard"),
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes.")] = Path("recipes"),
) -> None:
    """Train and evaluate a row of the scoreboard, and write its record beside the published figures.

    A record has the recipe, the version, the scores of every seed with 95 % intervals, mean and spread, signatures of
    the metrics, time, hardware, and the numbers of test pairs and sources that also occur in the training data. A
    command that was stopped continues with the seed that the record lacks.

    Examples:

        transduce reproduce --list

        transduce reproduce scan-simple --data scan --seeds 1

        transduce reproduce g2p2021-low --data g2p2021 --jobs 8

        transduce reproduce cmudict --data cmudict --quick
    """
    console = open_console()
    if list_rows or name is None:
        _show_rows(console)
        return
    from concurrent.futures import ProcessPoolExecutor
    from contextlib import nullcontext
    from multiprocessing import get_context

    from transduce.evaluation.reproduction import Reproduction, margins
    from transduce.evaluation.reproduction import reproduce as run_reproduction

    if data is None:
        raise InputError(
            "which folder has the data?", where="--data", remedy="transduce reproduce --list names the files"
        )
    task = Reproduction(name, data, runs, records, recipes, quick)
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        record = run_reproduction(task, seeds, lambda line: console.print(line, highlight=False, markup=False), pool)
    for metric, score in record["scores"].items():
        spread = "" if score["spread"] is None else f" ± {score['spread']:.2f}"
        console.print(f"{metric}: {score['mean']:.2f}{spread} of {len(score['seeds'])} seeds", highlight=False)
    for system, metric, points in margins(task.row, record):
        verdict = f"{abs(points):.2f} {'better' if points >= 0 else 'worse'}"
        console.print(f"{metric}: {verdict} than {system}", highlight=False, markup=False)
    console.print(f"record: {task.record_file}", highlight=False, markup=False, soft_wrap=True)


def _show_rows(console: Console) -> None:
    from transduce.evaluation.scoreboard import ROWS

    for name, row in ROWS.items():
        console.print(f"[cyan]{name}[/]  {row.title}", highlight=False, soft_wrap=True)
        console.print(f"    {row.origin}; recipe {row.recipe}", highlight=False, markup=False, soft_wrap=True)
        for published in row.published:
            scores = ", ".join(f"{metric} {value:g}" for metric, value in published.scores.items())
            origin = published.source if published.seen else f"{published.source}, from memory"
            console.print(f"    {scores}: {published.system} ({origin})", highlight=False, markup=False, soft_wrap=True)


def claims(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names of claims; without any, all are listed.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure every claim.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short trainings, for a lecture.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of records, figures, the page index.html, and the trained models.")
    ] = Path("runs/claims"),
    seed: Annotated[int, typer.Option(help="Random seed of data, initial weights and training.")] = 1,
    device: Device = "cpu",
    data: Annotated[
        Path | None, typer.Option(help="Pairs of your own (TSV), measured beside the generated ones: bottleneck.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A run or an imported encoder, measured beside the one trained here: context.")
    ] = None,
) -> None:
    """Measure claims of the literature: tables, figures, JSON records and one HTML page.

    Examples:

        transduce claims

        transduce claims gradient order

        transduce claims --all --quick

    A claim that was measured with the same settings is not measured again: the command continues where it stopped.
    """
    from transduce.claims import CLAIMS
    from transduce.claims.claim import Budget
    from transduce.claims.report import html_page, measure, show, verdict

    console = open_console()
    if not names and not every:
        for claim in CLAIMS.values():
            console.print(f"[cyan]{claim.name:<14}[/] {claim.statement}", highlight=False, soft_wrap=True)
        return
    chosen, measured = _choose(CLAIMS, [] if every else names or []), []
    for number, claim in enumerate(chosen, start=1):
        began, label = time.monotonic(), f"{number} of {len(chosen)}: {claim.name}"
        with console.status(label) as status:

            def report(text: str, label: str = label) -> None:
                status.update(f"{label}, {text}")
                if not console.is_terminal:
                    console.print(f"{label}, {text}", highlight=False)

            record = measure(claim, Budget(out, quick, seed, device, data, model, report))
        measured.append((claim, record))
        show(claim, record, console)
        seconds = time.monotonic() - began
        console.print(f"{label}: {verdict(record.measurement)}, {seconds:.0f} seconds", highlight=False)
        replace_file(out / "index.html", html_page(measured))
    console.print(f"\nrecords, figures and the page are in {out}: index.html", highlight=False, soft_wrap=True)


def _choose(known: dict[str, Claim], names: list[str]) -> list[Claim]:
    for name in names:
        if name not in known:
            raise InputError(f"no claim is called {name!r}", remedy=nearest(name, known))
    return [known[name] for name in names] or list(known.values())
