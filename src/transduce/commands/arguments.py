"""What several commands take: a run, a device, settings; and how their words become a model and values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from transduce.precision import Precision
    from transduce.predict import Model


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
    from transduce.predict import load

    return load(run, device=device, precision=cast("Precision | None", precision), own_parts=own_parts)


def read_settings(items: list[str] | None, **given: Any) -> dict[str, Any]:
    from transduce.recipe import override

    return {**override({}, items or []), **{name: value for name, value in given.items() if value is not None}}


def read_choices(*choices: str) -> list[int | str]:
    """Layers and heads by number or by name."""
    return [int(choice) if choice.lstrip("-").isdigit() else choice for choice in choices]
