"""Commands that describe recipes and architectures: models, schema, explain-shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import Overrides, TrustUserCode, open_console


def models() -> None:
    """List every component that a recipe can name, with its options.

    Example:

        transduce models
    """
    from rich.markup import escape

    from transduce.recipe.registry import REGISTRIES, describe, options, title

    console = open_console()
    for contract, registry in REGISTRIES.items():
        console.print(f"[bold]{title(contract)}[/]")
        for kind, part in registry.items():
            console.print(f"  [cyan]{kind:<12}[/] {escape(describe(part))}", highlight=False, soft_wrap=True)
            if names := ", ".join(options(part)):
                console.print(f"  {'':<12} [dim]{names}[/]", highlight=False, soft_wrap=True)


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page in Markdown instead.")] = False,
) -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them.

    Examples:

        transduce schema > recipe.schema.json

        transduce schema --markdown > recipe-reference.md
    """
    import json

    from transduce.recipe.reference import recipe_reference, recipe_schema

    print(recipe_reference().rstrip() if markdown else json.dumps(recipe_schema(), indent=2))


def explain_shapes(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Recipe, run directory, or file of training pairs.")],
    settings: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Write the table to this JSON file.")] = None,
    trust_user_code: TrustUserCode = False,
) -> None:
    """List every tensor of a model with its name, shape and meaning, for one training batch and one generation step.

    Examples:

        transduce explain-shapes recipe.yaml model.decoder.layers=2

        transduce explain-shapes runs/demo --json shapes.json
    """
    from transduce.explain.tensor_shapes import save_rows, shapes_of, show_rows

    rows = shapes_of(source, settings or [], trust_user_code=trust_user_code)
    show_rows(rows, open_console())
    if json is not None:
        save_rows(rows, json)
