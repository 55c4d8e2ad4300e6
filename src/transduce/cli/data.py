"""The name of an invented set in, its lines out: data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import open_console, written_to
from transduce.errors import InputError


def data(
    name: Annotated[str | None, typer.Argument(help="Which set; left out: the list of them.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many lines.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed, other lines.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Lines to test on: their words and names stand in no other file.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write; by default standard output. For a set of files, the folder for them."),
    ] = None,
) -> None:
    """Invent the lines of a small set to play with, as TSV; the same seed gives the same lines.

    Examples:

        transduce data

        transduce data questions --count 8000 > train.tsv

        transduce data questions --count 500 --held-out > test.tsv

        transduce train train.tsv --task answer data.test=test.tsv

    A set of files is written as a folder: files, pairs.tsv, which names them, and truth.jsonl, what is true of each.

        transduce data shapes --count 3000 --output shapes

        transduce train shapes/pairs.tsv --task caption
    """
    from transduce.synthetic import SYNTHETIC, generate, write_files

    if name is None:
        for known, dataset in SYNTHETIC.items():
            line = f"[cyan]{known:<16}[/] --task {dataset.task:<15} {dataset.description}"
            open_console().print(line, highlight=False, soft_wrap=True)
        return
    if name in SYNTHETIC and SYNTHETIC[name].writes_files:
        if output is None:
            raise InputError(f"the sources of {name} are files", remedy="give a folder for them: --output FOLDER")
        pairs = write_files(name, output, count, seed, held_out=held_out)
        open_console().print(f"{count:,} lines: {pairs}", highlight=False, soft_wrap=True)
        return
    with written_to(output, "") as stream:
        for example in generate(name, count, seed, held_out=held_out):
            stream.write(f"{example.source}\t{example.target}\n")
