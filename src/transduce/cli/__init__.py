"""Command line: the commands by group, and the entry point."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

import transduce
from transduce.cli import data, embed, evaluate, explain, generate, runs, serve, studio, train
from transduce.cli.options import discard_output
from transduce.errors import InputError
from transduce.storage import DISK_ERRORS, WriteError

app = typer.Typer(
    name="transduce",
    help="A toolkit for encoder-decoder models: train, generate, evaluate, explain.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=True,
)

# In the order of `transduce --help`.
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "demo": train.demo,
        "train": train.train,
        "distil": train.distil,
        "compare": train.compare,
        "reproduce": evaluate.reproduce,
        "edit-recipe": train.edit_recipe,
    },
    "Use": {
        "generate": generate.generate,
        "backtranslate": data.backtranslate,
        "serve": serve.serve,
        "embed": embed.embed,
        "search": embed.search,
        "cluster": embed.cluster,
        "similarity": embed.similarity,
    },
    "Inspect": {
        "list": runs.list_runs,
        "evaluate": evaluate.evaluate,
        "calibrate": evaluate.calibrate,
        "score": evaluate.score,
        "probe": evaluate.probe,
        "studio": studio.studio,
        "explain": explain.explain,
        "align": explain.align,
        "explain-shapes": explain.explain_shapes,
        "models": explain.models,
        "schema": explain.schema,
        "claims": evaluate.claims,
    },
    "Convert": {
        "convert": runs.convert,
        "export": runs.export,
        "push": runs.push,
        "merge": runs.merge,
        "quantise": runs.quantise,
        "shortlist": runs.shortlist,
    },
    "Data": {
        "inspect": data.inspect,
        "prepare": data.prepare,
        "data": data.data,
        "encode-images": data.encode_images,
        "decode-images": data.decode_images,
        "cache": runs.cache,
    },
}
for _group, _commands in GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_group)(_command)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"transduce {transduce.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@functools.cache
def _command_line() -> Callable[..., None]:
    """The commands with their options. To read all signatures takes longer than many a command."""
    return typer.main.get_command(app)


def main() -> None:
    """Runs a command. An error of the user's input is printed without a traceback, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # UTF-8, whatever the locale is
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    # Once: Python forgets which warnings it has shown whenever a library changes their filters.
    tell_once = functools.cache(_tell)
    warnings.showwarning = lambda message, *_, **__: tell_once(f"warning: {message}")
    try:
        try:
            _command_line()(standalone_mode=True)
        except SystemExit:
            sys.stdout.flush()  # here, where an error of the disk can be reported
            raise
    except InputError as error:
        _tell(f"error: {error}")
        sys.exit(2)
    except OSError as error:
        _tell(f"error: {_named(error)}")
        sys.exit(2)


def _tell(text: str) -> None:
    with suppress(OSError):  # standard error itself may be a file on a full disk
        print(text, file=sys.stderr)


def _named(error: OSError) -> str:
    """The message of an error. `storage` names every file: what has no name is standard output."""
    full = error.errno in DISK_ERRORS
    if error.filename is None:
        if not full:
            raise error
        discard_output()
        return str(WriteError("standard output", error))
    return str(WriteError(Path(error.filename), error)) if full else f"{error.filename}: {error.strerror}"
