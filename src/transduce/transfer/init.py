"""Trained runs and a fresh network enter; the network leaves with their weights where they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce import build
from transduce.data.prepare import Tokenizers, train_tokenizers
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.inference.quantisation import check_learns
from transduce.recipe import InitRecipe, ModelRecipe, Recipe, TextRecipe
from transduce.run import Run
from transduce.transfer.lora import weights_of

SECTIONS = ("encoder", "decoder", "model")  # in this order: `model` gives what the others left open
NAMED = 3  # names shown of a long list


@dataclass(frozen=True)
class Origin:
    """A trained run, opened to be drawn on. Its network is not built: only tensors are read, no code."""

    section: str
    folder: str
    recipe: Recipe
    tokenizers: Tokenizers
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Load:
    """What one run gave."""

    section: str
    run: str
    tokens: tuple[str, ...]  # the sides whose tokens are the same in both
    taken: tuple[str, ...]
    left: tuple[str, ...]  # in the run, but not taken: not asked for, or of another name, shape or vocabulary


@dataclass(frozen=True)
class Transfer:
    """What all runs gave together, and what is new because none of them had it."""

    loads: tuple[Load, ...]
    new: tuple[str, ...]

    def describe(self) -> list[str]:
        lines = []
        for load in self.loads:
            tokens = f"same tokens: {' and '.join(load.tokens)}" if load.tokens else "other tokens on both sides"
            lines.append(
                f"init.{load.section} from {load.run}: {_some(load.taken)} taken, {_some(load.left)} left; {tokens}"
            )
        return [*lines, f"init: {_some(self.new)} new"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _some(names: Sequence[str]) -> str:
    """`14 weights (a, b, c ...)`"""
    if not names:
        return "0 weights"
    shown = ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")
    return f"{len(names)} weight{'s' if len(names) > 1 else ''} ({shown})"


def open_origins(init: InitRecipe) -> list[Origin]:
    """The runs a recipe begins from; one that is missing or has learned nothing yet is refused."""
    found = []
    for section in SECTIONS:
        folder = getattr(init, section)
        if folder is None:
            continue
        run = Run(Path(folder))
        recipe = run.recipe()
        check_learns(recipe, folder)
        if not run.checkpoints.steps() and run.checkpoints.final() is None:
            raise InputError(
                f"init.{section}: this run has no checkpoint yet", where=folder, remedy="train it with --resume"
            )
        found.append(Origin(section, folder, recipe, run.tokenizers(), weights_of(run, recipe)))
    return found


def choose_tokenizers(recipe: Recipe, origins: Sequence[Origin]) -> Tokenizers:
    """The tokenizers of the runs begun from, where the recipe asks for the same kind; else ones trained anew.

    Labels are always trained anew: what a head says belongs to its own data.
    """
    tokens = recipe.tokens
    lent: dict[int, Tokenizer] = {}  # 0: source, 1: target
    for side, part in enumerate(("encoder", "decoder")):
        wanted = (tokens.source, tokens.target)[side]
        for origin in origins:
            given = origin.recipe.tokens
            same = _same_kind(wanted, (given.source, given.target)[side]) and given.numbered == tokens.numbered
            if origin.section in (part, "model") and same:
                lent.setdefault(side, origin.tokenizers[side])
    if recipe.model.head is not None:
        lent.pop(1, None)
    if len(lent) == 2 and tokens.source.kind == "given":  # imported: two ways to cut texts into the same pieces
        return lent[0], lent[1]
    if tokens.shared:
        both = [one for one in lent.values() if any(set(origin.tokenizers) == {one} for origin in origins)]
        return (both[0], both[0]) if both else train_tokenizers(recipe)
    if len(lent) == 2:
        return lent[0], lent[1]
    source, target = train_tokenizers(recipe)
    return lent.get(0, source), lent.get(1, target)


def _same_kind(wanted: TextRecipe, given: TextRecipe) -> bool:
    """Dropout changes how a vocabulary is used, not what is in it."""
    return wanted.model_copy(update={"dropout": 0.0}) == given.model_copy(update={"dropout": 0.0})


def check_origins(recipe: Recipe, tokenizers: Tokenizers, origins: Sequence[Origin]) -> None:
    """Refuses a run that would give nothing, on a network that takes no memory."""
    if origins:
        source, target = tokenizers
        with torch.device("meta"):
            network = build.build_model(recipe.model, source.size, target.size)
        take_weights(network, recipe.model, tokenizers, origins)


def take_weights(
    network: nn.Module, recipe: ModelRecipe, tokenizers: Tokenizers, origins: Sequence[Origin]
) -> Transfer:
    """Copies what fits: the same name, the same shape and, where rows stand for tokens, the same tokens."""
    own = network.state_dict(keep_vars=True)  # the tensors themselves: tied ones are one object under two names
    spoken = vocabulary_weights(recipe)
    filled: dict[int, Tensor] = {}
    loads = []
    for origin in origins:
        same = _same_sides(tokenizers, origin)
        taken = []
        for name, tensor in own.items():
            given = _refit(network, name, origin.weights.get(name), tensor)
            asked = origin.section == "model" or name.startswith(f"{origin.section}.")
            if given is None or not asked or given.shape != tensor.shape or not spoken.get(name, set()) <= same:
                continue
            # The first to come fills a tensor; a tied one may come again under its other name.
            if torch.equal(filled.setdefault(id(tensor), given), given):
                taken.append(name)
        if not taken:
            raise _nothing(origin, own)
        left = tuple(name for name in origin.weights if name not in taken)
        loads.append(Load(origin.section, origin.folder, tuple(sorted(same)), tuple(taken), left))
    with torch.no_grad():
        for tensor in own.values():
            if id(tensor) in filled:
                tensor.copy_(filled[id(tensor)])
    return Transfer(tuple(loads), tuple(name for name, tensor in own.items() if id(tensor) not in filled))


def _refit(network: nn.Module, name: str, given: Tensor | None, own: Tensor) -> Tensor | None:
    """A weight of another shape as the module that has it would make it fit, where it can: see a module's `refit`."""
    if given is None or given.shape == own.shape:
        return given
    place, _, leaf = name.rpartition(".")
    refit = getattr(network.get_submodule(place), "refit", None)
    made: Tensor | None = None if refit is None else refit(leaf, given)
    return given if made is None else made


def _same_sides(tokenizers: Tokenizers, origin: Origin) -> set[str]:
    pairs = zip(("source", "target"), tokenizers, origin.tokenizers, strict=True)
    return {side for side, own, given in pairs if own.fingerprint == given.fingerprint}


def vocabulary_weights(recipe: ModelRecipe) -> dict[str, set[str]]:
    """Which weights have rows for tokens, and of which side: those whose shape goes with the size of a vocabulary."""

    def shapes(source: int, target: int) -> dict[str, torch.Size]:
        with torch.device("meta"):
            network = build.build_model(recipe, source, target)
        return {name: tensor.shape for name, tensor in network.state_dict().items()}

    plain, result = shapes(8, 8), dict[str, set[str]]()
    for side, changed in (("source", shapes(9, 8)), ("target", shapes(8, 9))):
        for name, shape in changed.items():
            if shape != plain[name]:
                result.setdefault(name, set()).add(side)
    return result


def _nothing(origin: Origin, own: Mapping[str, Tensor]) -> InputError:
    """Why not: the first weight that both have and that differs, or the names that only one of them has."""
    part = "" if origin.section == "model" else f"{origin.section}."
    here = [name for name in own if name.startswith(part)]
    both = [name for name in here if name in origin.weights]
    differing = next((name for name in both if own[name].shape != origin.weights[name].shape), None)
    if not here:
        reason = f"this model has no {origin.section}"
    elif differing:
        there, wanted = tuple(origin.weights[differing].shape), tuple(own[differing].shape)
        reason = f"{differing} is {there} there and {wanted} here: give both the same options"
    elif both:
        reason = "the weights they share stand for other tokens, or came from another run: leave it out"
    else:
        reason = f"it has {_some(list(origin.weights))}, and this model asks for {_some(here)}"
    return InputError(f"init.{origin.section}: no weight of this run fits", where=origin.folder, remedy=reason)
