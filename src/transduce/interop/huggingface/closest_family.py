"""The supported family closest to an unknown architecture, by the names of its weights or by its own name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

from transduce.contracts import Family
from transduce.errors import InputError
from transduce.interop.huggingface import FAMILIES
from transduce.interop.huggingface.family import Config, WeightMap, split_layer
from transduce.interop.huggingface.folder import list_weights

LEAST = 0.3  # of the names of weights: below it, equal names are chance
SHAPE = re.compile(r"(For[A-Z]\w+|LMHeadModel|EncoderDecoderModel|Model)$")
SHOWN = 2  # names of weights in a message
Names = Mapping[str, str]  # names of weights by their pattern, one of each


def describe_closest(folder: Path, config: Config, name: str) -> str:
    """A clause about the closest family: of the same shape, else of any; empty where there is none.

    It never proposes another name for config.json: the weights of one architecture are not those of another.
    """
    alike = _by_name(name, _of_same_shape(name))
    names = {split_layer(one)[0]: one for one in _weight_names(folder)}
    for known in (alike, _by_name(name, FAMILIES)):
        best = max(known, key=lambda one: _overlap(FAMILIES[one], config, names), default="")
        if best and _overlap(FAMILIES[best], config, names) >= LEAST:
            return f"closest is {best}, {_differences(FAMILIES[best], config, names)}"
    return f"closest in name is {alike[0]}, another model" if alike else ""


def _of_same_shape(name: str) -> list[str]:
    shape = SHAPE.search(name)
    return [known for known in FAMILIES if shape and known.endswith(shape[0])]


def _by_name(name: str, known: Collection[str]) -> list[str]:
    """The most similar names first."""
    return get_close_matches(name, list(known), n=max(len(known), 1), cutoff=0.0)


def _weight_names(folder: Path) -> Collection[str]:
    """Names in safetensors files; pickled files are not opened for a message."""
    try:
        return list_weights(folder)
    except InputError:
        return ()


def _table(family: Family, config: Config, names: Names) -> WeightMap | None:
    """The weights of a family with the sizes of this config; None where it lacks a size or names a part, such as
    another encoder, that the family does not have."""
    try:
        return family.weight_map(family.flatten(config), list(names.values()))
    except (InputError, KeyError):
        return None


def _unknown(table: WeightMap, names: Names) -> list[str]:
    """Patterns of the weights that a family has not."""
    plain = ((pattern, name.removeprefix(table.prefix)) for pattern, name in names.items())
    return [
        pattern
        for pattern, name in plain
        if table.find(name) is None and name not in table.tied and not table.ignores(name)
    ]


def _overlap(family: Family, config: Config, names: Names) -> float:
    """Mean share of equal names: of those of the folder, and of those of the family."""
    table = _table(family, config, names)
    if table is None or not names:
        return 0.0
    plain = {pattern.removeprefix(table.prefix) for pattern in names}
    modules = {name.rpartition(".")[0] for name in plain}
    own = [*(one in modules for one in table.modules), *(one in plain for one in table.tensors)]
    known = len(names) - len(_unknown(table, names))
    return (known / len(names) + sum(own) / max(len(own), 1)) / 2


def _differences(family: Family, config: Config, names: Names) -> str:
    table = _table(family, config, names)
    assert table is not None
    if not (unknown := sorted(_unknown(table, names))):
        return "which has weights of the same names, but may compute something else"
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    return f"which has no {', '.join(unknown[:SHOWN])}{more}"
