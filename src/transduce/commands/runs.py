"""A run in, another one out that holds the same model: merge, quantise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.commands.arguments import OwnParts, RunArgument, open_run


def merge(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(help="Where the plain run is written.")],
    own_parts: OwnParts = False,
) -> None:
    """Write a run trained with adapters as a plain one, which needs its base no longer.

    Example:

        transduce merge runs/adapted runs/merged
    """
    from transduce.transfer import merge as merge_run

    weights = open_run(run, "cpu", own_parts).network.state_dict()
    print(merge_run(run, new, weights).folder)


def quantise(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(help="Where the smaller run is written.")],
    own_parts: OwnParts = False,
) -> None:
    """Write a run with its matrices in 8 bits: a quarter of the size, for generation, evaluation and scores.

    Example:

        transduce quantise runs/demo runs/small
    """
    from transduce.transfer import quantise as quantise_run

    print(quantise_run(run, new, open_run(run, "cpu", own_parts).network).folder)
