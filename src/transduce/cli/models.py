"""Commands that describe architectures: models, explain-shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import Overrides, open_console


def models() -> None:
    """List every component that a recipe can name, with its options.

    Example:

        transduce models
    """
    from rich.markup import escape

    from transduce.evaluation.evaluate import METRICS
    from transduce.recipe.registry import SHELVES, describe, options

    console = open_console()
    for contract, shelf in SHELVES.items():
        console.print(f"[bold]{contract.__name__.lower()}[/]")
        for kind, part in shelf.items():
            console.print(f"  [cyan]{kind:<12}[/] {escape(describe(part))}", highlight=False, soft_wrap=True)
            if names := ", ".join(options(part)):
                console.print(f"  {'':<12} [dim]{names}[/]", highlight=False, soft_wrap=True)
    console.print("[bold]metric[/]")
    for kind, metric in METRICS.items():
        console.print(f"  [cyan]{kind:<12}[/] {escape(describe(metric))}", highlight=False, soft_wrap=True)


def explain_shapes(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Recipe, run directory, or file of training pairs.")],
    settings: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Write the table to this JSON file.")] = None,
) -> None:
    """List every tensor of a model with its name, shape and meaning, for one training batch and one generation step.

    Examples:

        transduce explain-shapes recipe.yaml model.decoder.layers=2

        transduce explain-shapes runs/demo --json shapes.json
    """
    from transduce.explain.tensor_shapes import save_rows, shapes_of, show_rows

    rows = shapes_of(source, settings or [])
    show_rows(rows, open_console())
    if json is not None:
        save_rows(rows, json)
