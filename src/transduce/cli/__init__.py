"""Command line: the commands by group, and the entry point."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

import transduce
from transduce.cli import convert, data, demo, embed, evaluate, explain, generate, image_tokens, models, train
from transduce.errors import InputError

app = typer.Typer(
    name="transduce",
    help="A toolkit for encoder-decoder models: train, generate, evaluate, explain.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)

# In the order of `transduce --help`.
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "demo": demo.demo,
        "train": train.train,
        "compare": train.compare,
    },
    "Use": {
        "generate": generate.generate,
        "embed": embed.embed,
        "search": embed.search,
        "cluster": embed.cluster,
        "similarity": embed.similarity,
    },
    "Inspect": {
        "evaluate": evaluate.evaluate,
        "score": evaluate.score,
        "explain": explain.explain,
        "align": explain.align,
        "explain-shapes": models.explain_shapes,
        "models": models.models,
        "schema": models.schema,
    },
    "Convert": {
        "convert": convert.convert,
        "export": convert.export,
        "merge": convert.merge,
        "quantise": convert.quantise,
        "shortlist": convert.shortlist,
    },
    "Data": {
        "data": data.data,
        "encode-images": image_tokens.encode_images,
        "decode-images": image_tokens.decode_images,
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


def main() -> None:
    """Runs a command. An error of the user's input is printed without a traceback, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # UTF-8, whatever the locale is
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        app(standalone_mode=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
