"""The commands, put together: words in, an exit status out; what the user can mend is told without a traceback."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable

import typer

from transduce.cli.convert import convert, export, merge, quantise
from transduce.cli.data import data
from transduce.cli.embed import cluster, embed, search, similarity
from transduce.cli.evaluate import evaluate, score
from transduce.cli.explain import align, explain
from transduce.cli.generate import generate, shortlist
from transduce.cli.image_tokens import draw, pixels
from transduce.cli.models import explain_shapes, models
from transduce.cli.train import compare, demo, train
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
