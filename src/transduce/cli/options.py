"""What several commands take: a run, a device, settings; and how their words become a model and values."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from transduce.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.inference import Model
    from transduce.inference.lowering import Precision

RunArgument = Annotated[Path, typer.Argument(help="A run directory, as `transduce train` writes it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
OwnParts = Annotated[bool, typer.Option("--own-parts", help="Allow parts of your own code (kind: file:Class).")]
Output = Annotated[Path | None, typer.Option(help="Where to write; by default standard output.")]
Lines = Annotated[str, typer.Argument(help="Lines to read; - is standard input.")]
Documents = Annotated[Path, typer.Argument(help="A text file: one document a line.")]
Beam = Annotated[int | None, typer.Option(help="Beam width; 1 is greedy search.")]
Layer = Annotated[str, typer.Option(help="mean, last or a number")]
Head = Annotated[str, typer.Option(help="mean or a number")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the recipe's generation section, as key=value.")
]


def open_run(run: Path, device: str, own_parts: bool, precision: str | None = None) -> Model:
    from transduce.inference import load

    return load(run, device=device, precision=cast("Precision | None", precision), own_parts=own_parts)


def read_settings(items: list[str] | None, **given: Any) -> dict[str, Any]:
    from transduce.recipe import override

    return {**override({}, items or []), **{name: value for name, value in given.items() if value is not None}}


def read_choices(*choices: str) -> list[int | str]:
    """Layers and heads by number or by name."""
    return [int(choice) if choice.lstrip("-").isdigit() else choice for choice in choices]


def open_console(quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(quiet=quiet)


@contextmanager
def written_to(output: Path | None, read_from: str) -> Iterator[TextIO]:
    """Where lines go: a file, or standard output. A file that is still being read is not overwritten."""
    if output is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        return
    if any(output.exists() and Path(part).exists() and output.samefile(part) for part in read_from.split(",")):
        raise InputError("this file is being read", where=str(output), remedy="write to another file")
    with open(output, "w", encoding="utf-8", newline="\n") as stream:
        yield stream
