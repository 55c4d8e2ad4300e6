"""Parts of a Hugging Face family (contracts.Family): config.json, and a table of weight names.

An import reads the table from left to right, an export from right to left. In a table `*` is the layer number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.recipe import Recipe
from transduce.recipe.registry import LARGEST

Names = tuple[str, ...]
Content = dict[str, Any]  # of a JSON file
Weights = dict[str, Tensor]
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
HF_ACTIVATIONS = {native: hf for hf, native in reversed(ACTIVATIONS.items())}
NORM_EPS = {"layer": 1e-5, "rms": 1e-6}  # where a recipe sets none
NORM_LEAVES = {"gamma": "weight", "beta": "bias"}  # norm parameters in files converted from TensorFlow
MAX_SHOWN = 60  # characters of a wrong value in a message
MAX_NUMBER = 1e30
TARGET_TOKENIZER = "target_tokenizer"  # a key that exports write: the folder of the tokenizer of outputs
MIN_POSITIONS = 512  # written for sinusoidal encodings, which have no last position


@dataclass(frozen=True)
class ImportedModel:
    """Everything that a run needs."""

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]  # source, target
    weights: Weights


@dataclass(frozen=True)
class Config:
    """Typed access to the values of a JSON file; a value of the wrong type or size is an error that names it."""

    content: Mapping[str, Any]
    where: str
    places: Mapping[str, str] = field(default_factory=dict)  # files of single keys, where there are several files

    def count(self, name: str, default: int | None = None) -> int:
        """A size: an integer from 1."""
        value: Any = self.content.get(name)
        value = default if value is None else value
        if not _is_integer(value) or not 0 < value <= LARGEST:
            raise self.wrong(name, value, "is not a valid size")
        return int(value)

    def counts(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        """A list of sizes."""
        value: Any = self.content.get(name)
        value = list(default) if value is None else value
        if (
            not isinstance(value, list)
            or not value
            or not all(_is_integer(one) and 0 < one <= LARGEST for one in value)
        ):
            raise self.wrong(name, value, "is not a list of valid sizes")
        return tuple(value)

    def integer(self, name: str, low: int, high: int = LARGEST) -> int | None:
        """An integer from `low` to `high`; None where it is not given."""
        value = self.content.get(name)
        if value is not None and (not _is_integer(value) or not low <= value <= high):
            raise self.wrong(name, value, f"is not an integer from {low:,} to {high:,}")
        return value

    def number(self, name: str, low: float, high: float = math.inf) -> float | None:
        """A finite number from `low` to `high`; None where it is not given."""
        value = self.content.get(name)
        if value is not None and (not _is_number(value) or not low <= value <= high):
            limits = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
            raise self.wrong(name, value, f"is not a number {limits}")
        return value

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of finite numbers, or one; None where it is not given."""
        value = self.content.get(name)
        value = [value] if _is_number(value) else value
        if value is not None and not (isinstance(value, list) and value and all(map(_is_number, value))):
            raise self.wrong(name, value, "is not a list of numbers")
        return None if value is None else tuple(value)

    def token(self, name: str, size: int) -> int | None:
        """An id of a vocabulary of this size; None where it is not given."""
        value = self.content.get(name)
        if value is not None and not _is_token(value, size):
            raise self.wrong(name, value, f"is no token: ids are less than {size:,}")
        return value

    def tokens(self, name: str, size: int) -> list[int]:
        """Ids of a vocabulary of this size; empty where they are not given."""
        value = self.content.get(name) or []
        if not isinstance(value, list) or not all(_is_token(one, size) for one in value):
            raise self.wrong(name, value, f"is not a list of tokens: ids are less than {size:,}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty where it is not given."""
        value = self.content.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "is not a JSON object")
        return value or {}

    def rate(self, name: str, default: float = 0.0) -> float:
        value = self.content.get(name, default)
        if not _is_number(value) or not 0 <= value < 1:
            raise self.wrong(name, value, "is not in [0, 1)")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.content.get(name)
        return default if value is None else value is True

    def activation(self, name: str, default: str) -> str:
        value = self.content.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            remedy = f"supported: {', '.join(ACTIVATIONS)}"
            raise self.wrong(name, value, "is not a supported activation", remedy)
        return ACTIVATIONS[value]

    def require(self, name: str, value: Any) -> None:
        """Checks an option of which a single value is supported."""
        found = self.content.get(name, value)
        if found != value:
            raise self.wrong(name, found, "cannot be imported", f"only {value!r} is supported")

    def wrong(self, name: str, value: Any, problem: str, remedy: str = "fetch the folder again") -> InputError:
        """The error about a value: file, key, value, problem."""
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
        return InputError(f"{name}: {shown} {problem}", where=self.places.get(name, self.where), remedy=remedy)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether it is a finite number; an integer beyond the range of floats is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_token(value: Any, size: int) -> bool:
    return _is_integer(value) and 0 <= value < size


def unchanged(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def first(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


@dataclass(frozen=True)
class TensorMap:
    """Native names of one foreign tensor: the same tensor under each of them, or as many as `convert` returns."""

    names: Names
    convert: Callable[[Tensor], list[Tensor]] = unchanged
    invert: Callable[[list[Tensor]], Tensor] = first  # native tensors, one a name -> the foreign tensor

    def apply(self, tensor: Tensor) -> Weights:
        converted = self.convert(tensor)
        return dict(zip(self.names, converted * len(self.names) if len(converted) == 1 else converted, strict=True))


@dataclass(frozen=True)
class WeightMap:
    """The weights of a checkpoint by name, in both directions."""

    modules: Mapping[str, str]  # foreign module -> native module; weight and bias alike
    tensors: Mapping[str, TensorMap] = field(default_factory=dict)  # what needs more than a new name
    tied: Mapping[str, str] = field(default_factory=dict)  # tensor -> the tensor it repeats
    ignored: Names = ()  # masks and constants that follow from the config
    combine: Callable[[Weights], Weights] = dict  # last import step, where two foreign tensors make one native
    separate: Callable[[Weights], Weights] = dict  # inverse of `combine`, first step of an export
    prefix: str = ""  # of foreign names; a file may omit it
    outside: Names = ()  # tensors that have no prefix, of a model that has one

    def find(self, name: str) -> TensorMap | None:
        """The mapping of a foreign tensor; None: it does not belong to this architecture."""
        pattern, layer = split_layer(name)
        if pattern in self.tensors:
            found = self.tensors[pattern]
            return TensorMap(tuple(one.replace("*", layer) for one in found.names), found.convert)
        module, _, leaf = pattern.rpartition(".")
        native = self.modules.get(module)
        return TensorMap((f"{native.replace('*', layer)}.{NORM_LEAVES.get(leaf, leaf)}",)) if native else None

    def ignores(self, name: str) -> bool:
        return split_layer(name)[0] in self.ignored


def split_layer(name: str) -> tuple[str, str]:
    """`a.3.b.0.c` -> `a.*.b.0.c` and `3`"""
    found = re.search(r"\.(\d+)\.", name)
    return (name, "") if found is None else (f"{name[: found.start()]}.*.{name[found.end() :]}", found[1])


def max_positions(recipe: Recipe, part: Mapping[str, Any]) -> int:
    """Number of positions to write into config.json."""
    longest: int | None = part["position"].get("max_positions")
    return longest or max(MIN_POSITIONS, recipe.data.max_length + 1, recipe.generation.max_length + 1)


def hf_activation(part: Mapping[str, Any]) -> str:
    name: str = part["activation"]
    return HF_ACTIVATIONS.get(name, name)
