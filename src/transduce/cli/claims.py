"""Command that measures claims of the literature: claims."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transduce.cli.options import Device, open_console
from transduce.errors import InputError, nearest
from transduce.storage import replace_file

if TYPE_CHECKING:
    from transduce.claims.claim import Claim


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
