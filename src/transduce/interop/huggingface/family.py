"""What a family of models from elsewhere says of itself: its options in ours, and one table of names.

A table maps their module to ours, weight and bias alike; `*` is the number of the layer. What needs more than another
name (a matrix that is turned, one that holds three) stands in `special`, by the name of the weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.interop.huggingface.languages import Languages
from transduce.recipe import Recipe
from transduce.recipe.registry import LARGEST

Names = tuple[str, ...]
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


LEAVES = {"gamma": "weight", "beta": "bias"}  # what the oldest files call the two of a norm


@dataclass(frozen=True)
class Imported:
    """All that a run needs."""

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]  # source, target
    weights: dict[str, Tensor]


def same(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def first(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


@dataclass(frozen=True)
class Place:
    """Our names for one of their weights: one tensor for all of them, or as many as `change` makes."""

    names: Names
    change: Callable[[Tensor], list[Tensor]] = same
    back: Callable[[list[Tensor]], Tensor] = first  # ours, one a name, -> theirs

    def fill(self, tensor: Tensor) -> dict[str, Tensor]:
        made = self.change(tensor)
        return dict(zip(self.names, made * len(self.names) if len(made) == 1 else made, strict=True))


@dataclass(frozen=True)
class Settings:
    """config.json, asked by name: a value of the wrong kind is an error that names it."""

    content: Mapping[str, Any]
    where: str

    def count(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
            raise InputError(f"{name}: {value!r} is no size", where=self.where, remedy="fetch the folder again")
        return value

    def rate(self, name: str, default: float = 0.0) -> float:
        value = self.content.get(name, default)
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise InputError(f"{name}: {value!r} is no rate", where=self.where, remedy="fetch the folder again")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.content.get(name)
        return default if value is None else value is True

    def activation(self, name: str, default: str) -> str:
        value = self.content.get(name) or default
        if value not in ACTIVATIONS:
            remedy = f"known: {', '.join(ACTIVATIONS)}"
            raise InputError(f"{name}: there is no activation {value!r} here", where=self.where, remedy=remedy)
        return ACTIVATIONS[value]

    def only(self, name: str, wanted: Any) -> None:
        """An option that has but one value here."""
        value = self.content.get(name, wanted)
        if value != wanted:
            raise InputError(
                f"{name}: {value!r} cannot be imported", where=self.where, remedy=f"only {wanted!r} is known here"
            )


@dataclass(frozen=True)
class Family:
    """One kind of model that can be imported."""

    model: Callable[[Settings, Collection[str]], dict[str, Any]]  # settings and their weights -> a model recipe
    table: Mapping[str, str]
    special: Mapping[str, Place] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)  # weights that only repeat another one
    aside: Names = ()  # masks and numbers that follow from the settings; `*` as in the table
    joined: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict  # at the end, where two of theirs make one of ours
    parted: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict  # the way back, before anything is named as theirs
    data: Mapping[str, Any] = field(default_factory=lambda: {"format": "pairs"})  # what it reads
    closes: bool = True  # whether </s> ends what it reads
    starts: str = "decoder_start_token_id"  # what the first token of its output is called in the settings
    prefix: str = ""  # of names, where a file may have it or not
    languages: Literal["none", "may", "must"] = "none"  # whether texts begin with the code of their language
    sources: Callable[[Path, Settings], dict[str, Any]] | None = None  # what it reads, where that is no text
    prompt: Callable[[Mapping[str, Any], Languages | None, str], list[int]] | None = None  # what outputs are begun with
    hidden: re.Pattern[str] | None = None  # tokens that are no text, where its tokenizer does not say so
    labels: str = ""  # what its labels are in our tokens, `labels` or `words`; it has none where it says tokens

    @property
    def headed(self) -> bool:
        """Whether something stands on top of an encoder alone, whose names then have a prefix."""
        return bool(self.labels) or "noise" in self.data

    def place(self, name: str) -> Place | None:
        """Where one of their weights goes; None: there is no such weight in this family."""
        general, number = generalised(name)
        if general in self.special:
            special = self.special[general]
            return Place(tuple(one.replace("*", number) for one in special.names), special.change)
        module, _, leaf = general.rpartition(".")
        ours = self.table.get(module)
        return Place((f"{ours.replace('*', number)}.{LEAVES.get(leaf, leaf)}",)) if ours else None

    def ignores(self, name: str) -> bool:
        return generalised(name)[0] in self.aside


def generalised(name: str) -> tuple[str, str]:
    """`a.3.b.0.c` -> `a.*.b.0.c` and `3`"""
    found = re.search(r"\.(\d+)\.", name)
    return (name, "") if found is None else (f"{name[: found.start()]}.*.{name[found.end() :]}", found[1])
