"""What a toolkit's reader says of a checkpoint in; a recipe, tokenizers and weights of one of our models out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from transduce import build
from transduce.errors import InputError
from transduce.interop.huggingface.family import Family, Imported, Settings
from transduce.interop.huggingface.folder import Stored, read_weight
from transduce.interop.legacy.vocabularies import Side
from transduce.layers.meta_init import outlined
from transduce.recipe import Recipe, parse

LONGEST = 512  # tokens of a text in training
SOURCE, TARGET, OUTPUT = (
    "encoder.embedding.table.weight",
    "decoder.embedding.table.weight",
    "decoder.output.layer.weight",
)
BIAS = "decoder.output.layer.bias"
TIED = {"none": (), "target": (TARGET, OUTPUT), "all": (SOURCE, TARGET, OUTPUT)}
FIT = "the settings and the weights belong to different models, or to one with additions"
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Orphan:
    """A checkpoint of a frozen toolkit, its weights under the names of its family's table."""

    family: Family
    settings: Settings
    weights: Mapping[str, Stored]
    source: Side
    target: Side
    plain: tuple[str, ...] = ()  # endings of biases of ours that are zero where they have none
    generation: Mapping[str, Any] = field(default_factory=dict)


def assemble(orphan: Orphan) -> Imported:
    """Everything is checked by name and shape before any number is read."""
    recipe = _recipe(orphan)
    with outlined():
        network = build.build_model(recipe.model, orphan.source.size, orphan.target.size)
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    _check(_fill(orphan, recipe, wanted, _outline), wanted, orphan.settings.where)
    weights = _fill(orphan, recipe, wanted, read_weight)
    tied = TIED[recipe.model.tie]
    if any(not torch.equal(weights[name], weights[tied[0]]) for name in tied):
        raise InputError("weights that are said to be one differ", where=orphan.settings.where, remedy=FIT)
    return Imported(recipe, (orphan.source.tokenizer, orphan.target.tokenizer), weights)


def _outline(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, device="meta")


def _recipe(orphan: Orphan) -> Recipe:
    model = orphan.family.model(orphan.settings, orphan.weights)
    if max(model[side]["layers"] for side in ("encoder", "decoder")) > len(orphan.weights):
        raise InputError("more layers than weights", where=orphan.settings.where, remedy=FIT)
    one = orphan.source.tokenizer.fingerprint == orphan.target.tokenizer.fingerprint
    ends = [part["position"]["longest"] for part in model.values() if isinstance(part, dict) and _has_end(part)]
    content = {
        "data": {"format": "pairs", "max_length": min([LONGEST, *(end - 1 for end in ends)])},
        "tokens": {
            "source": {"kind": "given", "size": orphan.source.size},
            "target": {"kind": "given", "size": orphan.target.size},
            "shared": one,
        },
        "model": model,
        "generation": dict(orphan.generation),
    }
    return build.complete_recipe(parse(content, orphan.settings.where), orphan.settings.where)


def _has_end(part: Mapping[str, Any]) -> bool:
    return "longest" in (part.get("position") or {})


def _fill(
    orphan: Orphan, recipe: Recipe, wanted: Mapping[str, tuple[int, ...]], take: Callable[[Stored], Tensor]
) -> Weights:
    """Ours from theirs, rows of tokens in our order."""
    made: Weights = {}
    for name, stored in orphan.weights.items():
        place = orphan.family.place(name)
        if place is None:
            if orphan.family.ignores(name):
                continue
            problem = f"{name} would be dropped: it has no place in this family"
            raise InputError(problem, where=orphan.settings.where, remedy=FIT)
        filled = place.fill(take(stored))
        if twice := sorted(set(filled) & set(made)):
            raise InputError(f"{name} is a second {twice[0]}", where=orphan.settings.where, remedy=FIT)
        made |= filled
    made = orphan.family.joined(made)
    for name, tensor in list(made.items()):
        if name in (SOURCE, TARGET, OUTPUT, BIAS):
            made[name] = _ordered(name, tensor, orphan)
    tied = TIED[recipe.model.tie]
    there = [name for name in tied if name in made]
    made |= {name: made[there[0]] for name in tied if there and name not in made}
    anywhere = next(iter(made.values())).device
    for name, shape in wanted.items():
        if name not in made and name.endswith((*orphan.plain, BIAS)):
            made[name] = torch.zeros(shape, device=anywhere)
    if BIAS in made:
        made[BIAS] = orphan.target.rows.hush(made[BIAS])
    return made


def _ordered(name: str, tensor: Tensor, orphan: Orphan) -> Tensor:
    rows = orphan.source.rows if name == SOURCE else orphan.target.rows
    if len(tensor) != rows.theirs:
        problem = f"{name} has {len(tensor)} rows, and the vocabulary {rows.theirs} words"
        raise InputError(problem, where=orphan.settings.where, remedy="the vocabulary belongs to another model")
    return rows.pick(tensor)


def _check(made: Weights, wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """By names and shapes alone: what is missing, what would be dropped, what does not fit."""
    for name, tensor in made.items():
        if name not in wanted:
            raise InputError(f"{name} would be dropped: the settings ask for no such part", where=where, remedy=FIT)
        if tuple(tensor.shape) != wanted[name]:
            problem = f"{name} would be {tuple(tensor.shape)}, and the settings ask for {wanted[name]}"
            raise InputError(problem, where=where, remedy=FIT)
    if missing := sorted(set(wanted) - set(made)):
        raise InputError(f"the weights of {missing[0]} are missing", where=where, remedy=FIT)
