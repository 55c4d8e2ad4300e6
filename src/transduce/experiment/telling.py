"""What was read, built and taken over -> lines on the console, before the long part begins."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import nn

from transduce import build, transfer
from transduce.disk import replace_file
from transduce.prepare import Data, Tokenizers
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.training.devices import Processes


def tell(
    console: Console,
    run: Run,
    recipe: Recipe,
    data: Data,
    tokenizers: Tokenizers,
    network: nn.Module,
    device: torch.device,
    still: Sequence[str],
) -> None:
    """What was read and what was built, before the long part begins."""
    for line in data.train.describe():
        console.print(line, highlight=False, markup=False)
    sizes = " and ".join(f"{tokenizer.size:,} {tokenizer.kind}" for tokenizer in dict.fromkeys(tokenizers))
    padding = data.batches(recipe, tokenizers).padding(0)
    console.print(
        f"{len(data.rows):,} {data.train.what} to train on, {len(data.dev_rows):,} held out; vocabulary {sizes}; "
        f"padding {padding:.1%}",
        highlight=False,
    )
    with transfer.frozen(network, still):
        moving = build.count_parameters(network)
    trained = f", {moving:,} of them trained," if still else ""
    console.print(
        f"{build.count_parameters(network):,} parameters{trained} on {device}; "
        f"recipe, log and checkpoints in {run.folder}",
        highlight=False,
        markup=False,
    )


def tell_transfer(run: Run, taken: transfer.Transfer, console: Console | None, processes: Processes) -> None:
    """What the weights began as, said and kept: the log of a run without a checkpoint begins here."""
    lines = taken.describe()
    if processes.is_main:
        event = {"kind": "event", "event": "init", "step": 0, "text": "\n".join(lines), **taken.to_json()}
        replace_file(run.log, (json.dumps(event, ensure_ascii=False) + "\n").encode())
    if console is not None:
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
