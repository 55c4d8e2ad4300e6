"""A run and its network enter; a smaller run leaves, which holds its matrices in 8 bits and learns no more."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from transduce.errors import InputError
from transduce.layers.rounding import rounded_weights
from transduce.recipe import Recipe
from transduce.run import Run


def quantise(folder: str | Path, new: str | Path, network: nn.Module) -> Run:
    """Writes a run with the same tokens and `model.stored: int8`; `network` is the one that the run holds, in fp32."""
    run, target = Run(Path(folder)), Run(Path(new))
    recipe = run.recipe()
    if recipe.model.stored == "int8":
        raise InputError("this run is in 8 bits already", where=str(run.folder), remedy="copy the folder")
    if target.exists or target.checkpoints.steps():
        raise InputError("there is a run here already", where=str(target.folder), remedy="give another folder")
    checkpoint = run.checkpoints.chosen()
    if checkpoint is None:
        raise InputError("this run has no checkpoint yet", where=str(run.folder), remedy="train it with --resume")
    tokenizers = run.tokenizers()
    target.folder.mkdir(parents=True, exist_ok=True)
    target.save_tokenizers(*tokenizers)
    target.checkpoints.save_final(checkpoint.step, rounded_weights(network), {})
    changes = {
        "model": recipe.model.model_copy(update={"stored": "int8"}),
        # Adapters are in the matrices by now, and what the run began from is behind it.
        "training": recipe.training.model_copy(update={"adapters": None}),
        "init": type(recipe.init)(),
    }
    target.save_recipe(recipe.model_copy(update=changes))
    return target


def check_learns(recipe: Recipe, where: str) -> None:
    """Refuses a run whose weights were rounded where it would have to learn."""
    if recipe.model.stored == "int8":
        raise InputError(
            "this run holds its matrices in 8 bits, for generation: it learns no more",
            where=where,
            remedy="train the run that it was made from, or begin from that one",
        )
