"""Hugging Face family: the contract that every supported architecture fulfils.

A family maps config.json to the model section of a recipe and back, and holds one table of weight names that import
reads from left to right and export from right to left. In a table `*` is the layer number.
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
MIN_POSITIONS = 512  # written for sinusoidal encodings, which have no last position


@dataclass(frozen=True)
class ImportedModel:
    """Everything that a run needs."""

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]  # source, target
    weights: Weights


@dataclass(frozen=True)
class Config:
    """Typed access to the values of config.json; a value of the wrong type is an error that names it."""

    content: Mapping[str, Any]
    where: str

    def count(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
            raise InputError(
                f"{name}: {value!r} is not a valid size", where=self.where, remedy="fetch the folder again"
            )
        return value

    def rate(self, name: str, default: float = 0.0) -> float:
        value = self.content.get(name, default)
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise InputError(f"{name}: {value!r} is not in [0, 1)", where=self.where, remedy="fetch the folder again")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.content.get(name)
        return default if value is None else value is True

    def activation(self, name: str, default: str) -> str:
        value = self.content.get(name) or default
        if value not in ACTIVATIONS:
            remedy = f"supported: {', '.join(ACTIVATIONS)}"
            raise InputError(f"{name}: the activation {value!r} is not supported", where=self.where, remedy=remedy)
        return ACTIVATIONS[value]

    def require(self, name: str, value: Any) -> None:
        """Checks an option of which a single value is supported."""
        found = self.content.get(name, value)
        if found != value:
            raise InputError(
                f"{name}: {found!r} cannot be imported", where=self.where, remedy=f"only {value!r} is supported"
            )


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


def _no_names(config: Mapping[str, Any]) -> Names:
    return ()


def _no_weights(config: Mapping[str, Any]) -> Weights:
    return {}


def _no_files(recipe: Recipe) -> Content:
    return {}


def _same_config(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Family:
    """One architecture of the transformers library, as its config.json names it."""

    to_recipe: Callable[[Config, Collection[str]], Content]  # config and weight names -> model section of a recipe
    weights: WeightMap | Callable[[Config, Collection[str]], WeightMap]
    # Recipe and the foreign id of <pad> -> config.json, or None: a model of another shape. Whether it describes the
    # same model is checked by reading it with `to_recipe`. Without `to_config` the family is only imported.
    to_config: Callable[[Recipe, int | None], Content | None] | None = None
    flatten: Callable[[Config], Config] = _same_config  # nested config -> one with the values of the decoder on top

    # Import: data and tokenizers
    data: Mapping[str, Any] = field(default_factory=lambda: {"format": "pairs"})
    read_sources: Callable[[Path, Config], Content] | None = None  # data.sources of a model that reads no text
    source_eos: bool = True  # whether </s> ends every source
    start_token: str = "decoder_start_token_id"  # config key of the first output token; empty: no decoder
    languages: Literal["none", "optional", "required"] = "none"  # language codes around texts
    prompt: Callable[[Mapping[str, Any], Languages | None, str], list[int]] | None = None  # forced first output ids
    hidden_tokens: re.Pattern[str] | None = None  # special tokens that the tokenizer does not mark as special
    label_kind: str = ""  # tokenizer kind of the labels, `labels` or `words`; empty: outputs are tokens

    # Export
    required_names: Callable[[Mapping[str, Any]], Names] = _no_names  # weights that `to_recipe` looks for
    constant_weights: Callable[[Mapping[str, Any]], Weights] = _no_weights  # weights that native models do not have
    extra_files: Callable[[Recipe], Content] = _no_files  # JSON files by name

    @property
    def masked_lm(self) -> bool:
        return "noise" in self.data

    @property
    def has_head(self) -> bool:
        """Whether the checkpoint holds a head beside the encoder, whose names then carry a prefix."""
        return bool(self.label_kind) or self.masked_lm

    def weight_map(self, config: Config, names: Collection[str]) -> WeightMap:
        return self.weights if isinstance(self.weights, WeightMap) else self.weights(config, names)


def max_positions(recipe: Recipe, part: Mapping[str, Any]) -> int:
    """Number of positions to write into config.json."""
    longest: int | None = part["position"].get("longest")
    return longest or max(MIN_POSITIONS, recipe.data.max_length + 1, recipe.generation.max_length + 1)


def hf_activation(part: Mapping[str, Any]) -> str:
    name: str = part["activation"]
    return HF_ACTIVATIONS.get(name, name)
