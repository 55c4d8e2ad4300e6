"""A run enters; its plain weights leave, put together with its base where it learned adapters beside one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from transduce import build, shelves
from transduce.errors import InputError
from transduce.layers.rounding import whole_weights
from transduce.recipe import InitRecipe, Recipe
from transduce.run import Run
from transduce.transfer.adapters import joined


def weights_of(run: Run, recipe: Recipe, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """What a run predicts with. `names` are those of its network; left out, they are found from its recipe."""
    checkpoint = run.checkpoints.chosen()
    if checkpoint is None:
        raise InputError("this run has no checkpoint yet", where=str(run.folder), remedy="train it with --resume")
    adapters = recipe.training.adapters
    if adapters is None:
        return whole_weights(checkpoint.weights)
    assert recipe.init.model is not None, "a recipe with adapters has a base"
    base = Run(Path(recipe.init.model))
    if not base.exists:
        raise InputError(
            f"the base of these adapters is gone: {base.folder}",
            where=str(run.recipe_file),
            remedy="put the run back there, or set init.model in this file to where it is now",
        )
    given = weights_of(base, base.recipe())
    return joined(given, checkpoint.weights, names or _names(run, recipe), adapters, str(base.folder))


def _names(run: Run, recipe: Recipe) -> list[str]:
    if own := shelves.own_parts(recipe):
        raise InputError(
            f"this model needs code of its own: {', '.join(own)}",
            where=str(run.recipe_file),
            remedy="merge it first: transduce merge RUN NEW_RUN --own-parts",
        )
    with torch.device("meta"):  # the names are those of any vocabulary
        return list(build.build_model(build.complete_recipe(recipe).model, 8, 8).state_dict())


def merge(folder: str | Path, new: str | Path, weights: dict[str, Tensor] | None = None) -> Run:
    """Writes a plain run that needs no base: the same recipe without adapters, the same tokens, the merged weights."""
    run, target = Run(Path(folder)), Run(Path(new))
    recipe = run.recipe()
    if recipe.training.adapters is None:
        raise InputError("this run has no adapters to merge", where=str(run.folder), remedy="it is a plain run already")
    if target.exists or target.checkpoints.steps():
        raise InputError("there is a run here already", where=str(target.folder), remedy="give another folder")
    checkpoint = run.checkpoints.chosen()
    plain = weights or weights_of(run, recipe)
    assert checkpoint is not None
    tokenizers = run.tokenizers()
    target.folder.mkdir(parents=True, exist_ok=True)
    target.save_tokenizers(*tokenizers)
    target.checkpoints.save_final(checkpoint.step, plain, {})
    training = recipe.training.model_copy(update={"adapters": None})
    # Whoever trains the new run further begins from what was merged.
    init = InitRecipe(model=str(run.folder.absolute()))
    target.save_recipe(recipe.model_copy(update={"training": training, "init": init}))
    return target
