"""Recipes and shelves in, what they hold out: models, explain-shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import open_console


def models() -> None:
    """What is on the shelves: every part that a recipe can name, one line each.

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
    source: Annotated[str, typer.Argument(help="A recipe.yaml, a run directory, or a file of pairs.")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Every tensor of a model, by name, shape in letters, size and meaning: one batch, then one generation step.

    Examples:

        transduce explain-shapes recipe.yaml model.decoder.layers=2

        transduce explain-shapes runs/demo --json shapes.json
    """
    from transduce.explain.tensor_shapes import draw, save, shapes_of

    rows = shapes_of(source, settings or [])
    draw(rows, open_console())
    if json is not None:
        save(rows, json)
