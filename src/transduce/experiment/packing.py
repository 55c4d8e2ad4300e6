"""A recipe that says `packed: auto` in, the same with a yes or no out; a yes that cannot be is an error."""

from __future__ import annotations

import torch
from torch import nn

from transduce import build
from transduce.attention.attend import Attend
from transduce.attention.positions import places
from transduce.contracts import Position
from transduce.data.packing import LONGEST
from transduce.errors import InputError
from transduce.layers.outline import outlined
from transduce.model import Transducer
from transduce.objectives import Objective
from transduce.prepare import Data, Tokenizers
from transduce.recipe import Recipe


def with_packing(
    recipe: Recipe, tokenizers: Tokenizers, data: Data, objective: Objective, device: torch.device
) -> Recipe:
    """Batches are packed where passes are recorded, which one shape makes faster, and where all parts can be."""
    asked = recipe.training.packed
    if asked is False:
        return recipe
    source, target = tokenizers
    with outlined():
        network = build.build_model(recipe.model, source.size, target.size, source.starts)
    reason = why_not(recipe, network, data, objective)
    if asked is True and reason:
        raise InputError(f"training.packed: {reason}", remedy="leave it out, or set it to false")
    pays = device.type == "cuda" and recipe.training.record and _fused(network)
    packs = not reason and (asked is True or pays)
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"packed": packs})})


def _fused(network: nn.Module) -> bool:
    """Whether no scores are written down: in shared rows there are several times as many."""
    kinds = (type(part) for part in network.modules() if isinstance(part, Position))
    attentions = (part for part in network.modules() if isinstance(part, Attend))
    return all(kind.bias is Position.bias for kind in kinds) and all(one.fused for one in attentions)


def why_not(recipe: Recipe, network: Transducer, data: Data, objective: Objective) -> str:
    """What stands against several pairs in a row; nothing: they can be."""
    end = places(network)
    dropout = recipe.tokens.source.dropout or recipe.tokens.target.dropout
    texts = recipe.data.passage is None and data.noise is None and data.train.items is None
    for wrong, reason in (
        (not network.packs, "only a Transformer encoder and decoder, both of attention, can be packed"),
        (not objective.packs, "this objective does not read packed batches"),
        (not texts or data.train.sourceless, "only pairs of texts can be packed"),
        (bool(dropout), "with dropout of merges the lengths of texts change"),
        (end is not None and end < LONGEST, f"rows have up to {LONGEST} places, and the model has {end}"),
        (data.packing(recipe) is None, f"{recipe.training.budget} tokens are not one row of a packed batch"),
    ):
        if wrong:
            return reason
    return ""
