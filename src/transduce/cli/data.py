"""Command that generates synthetic data sets: data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import open_console, open_output
from transduce.errors import InputError


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
            line = f"[cyan]{known:<16}[/] --task {dataset.task:<15} {dataset.description}"
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
