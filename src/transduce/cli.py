"""The commands, put together: words in, an exit status out; what the user can mend is told without a traceback."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable

import typer

from transduce.commands.attention import align, explain
from transduce.commands.conversion import convert, export
from transduce.commands.data import data
from transduce.commands.evaluation import evaluate, score
from transduce.commands.generation import generate, shortlist
from transduce.commands.parts import explain_shapes, models
from transduce.commands.pictures import draw, pixels
from transduce.commands.runs import merge, quantise
from transduce.commands.training import compare, demo, train
from transduce.commands.vectors import cluster, embed, search, similarity
from transduce.errors import InputError

app = typer.Typer(
    help="Encoder-decoder models: pairs in, a trained, scored, explained model out.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)

# In the order of --help: what is learned, what it makes, how good it is, where it looked, what lies close, the parts.
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "compare": compare,
    "generate": generate,
    "evaluate": evaluate,
    "score": score,
    "explain": explain,
    "align": align,
    "embed": embed,
    "search": search,
    "cluster": cluster,
    "similarity": similarity,
    "merge": merge,
    "quantise": quantise,
    "shortlist": shortlist,
    "convert": convert,
    "export": export,
    "data": data,
    "pixels": pixels,
    "draw": draw,
    "models": models,
    "explain-shapes": explain_shapes,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Runs a command; what the user can mend is told in words, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text is UTF-8 here, whatever the machine's own habit is
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
