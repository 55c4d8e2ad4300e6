"""The name of an invented set in, its lines out: data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.commands.output import open_console, written_to


def data(
    name: Annotated[str | None, typer.Argument(help="Which set; left out: the list of them.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many lines.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed, other lines.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Lines to test on: their words and names stand in no other file.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write; by default standard output.")] = None,
) -> None:
    """Invent the lines of a small set to play with, as TSV; the same seed gives the same lines.

    Examples:

        transduce data

        transduce data questions --count 8000 > train.tsv

        transduce data questions --count 500 --held-out > test.tsv

        transduce train train.tsv --task answer data.test=test.tsv
    """
    from transduce.made import SETS, generate

    if name is None:
        for known, one in SETS.items():
            line = f"[cyan]{known:<16}[/] --task {one.task:<14} {one.about}"
            open_console().print(line, highlight=False, soft_wrap=True)
        return
    with written_to(output, "") as stream:
        for example in generate(name, count, seed, held_out=held_out):
            stream.write(f"{example.source}\t{example.target}\n")
