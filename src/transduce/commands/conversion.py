"""A model from elsewhere in, a run out: convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder: config.json, safetensors, tokenizer.json.")],
    run: Annotated[Path, typer.Argument(help="Where the run is written.")],
) -> None:
    """Write a model from elsewhere as a run, which can be read, searched, explained and trained like any other.

    Example:

        transduce convert opus-mt-en-de runs/en-de
    """
    from transduce.interop import convert as write_run

    print(write_run(source, run).folder)
