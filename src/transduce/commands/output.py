"""Where commands write: the console for people, a file or standard output for lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from transduce.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


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
