"""A model recipe in, sizes out that can be told apart, so that a size gives away its letter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from transduce.flow import Step
from transduce.recipe import ModelRecipe

Sizes = Mapping[str, int]  # by letter; with a prime: the encoder's, where the decoder's is another


def choose_sizes(model: ModelRecipe, vocabularies: tuple[int, int] | None) -> dict[str, int]:
    """Sizes of our own choice that meet neither each other nor any number of the recipe, so that a size tells."""
    specs = [spec for spec in (model.decoder, model.encoder) if spec is not None]
    sizes = _given_sizes(specs)
    around = {0, *(spec["kernel"] - 1 for spec in specs if isinstance(spec.get("kernel"), int))}
    taken = around | _taken(specs)

    def pick(name: str, first: int, *companions: int) -> None:
        for size in count(first):
            met = {size + more for more in (*around, *companions)}
            if not met & taken:
                sizes[name] = size
                taken.update(met)
                return

    if vocabularies is not None:
        sizes["V"] = vocabularies[1]
        taken.add(sizes["V"])
    pick("B", 3 if model.head is not None else 2)
    pick("N", 3)
    while sizes["B"] * sizes["N"] in taken:
        pick("N", sizes["N"] + 1)
    sizes["R"] = sizes["B"] * sizes["N"]
    taken.add(sizes["R"])
    if model.head is not None:
        sizes["T"] = 2  # a label and </s>
    else:
        pick("T", 5)
    pick("S", 7, sizes["T"])
    taken.add(sizes["B"] * (sizes["S"] - 1) + 1)  # real tokens: what a packed sequence holds
    pick("U", 4, sizes["S"])
    if vocabularies is None:
        pick("V", 29)
    return sizes


def _given_sizes(specs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What the recipe says of width, layers and heads: of the decoder, and of the encoder where it differs."""
    sizes: dict[str, int] = {}
    for prime, spec in zip(("", "'"), specs, strict=False):
        heads = spec.get("heads")
        own = {"D": spec["width"], "L": spec.get("layers"), "H": heads}
        if heads:
            own["K"] = spec.get("head_width") or spec["width"] // heads
            own["G"] = spec.get("key_heads") if spec.get("key_heads") != heads else None
        sizes |= {name + prime: size for name, size in own.items() if size is not None and sizes.get(name) != size}
    return sizes


def _taken(specs: Sequence[Mapping[str, Any]]) -> set[int]:
    """Sizes that the model itself may give to an axis."""
    taken = {1, *_numbers(specs), sum(spec["width"] for spec in specs)}
    for spec in specs:
        width = spec["width"]
        taken |= {width // 2, width // (spec.get("heads") or 1), *(width * times for times in range(1, 9))}
        taken |= {2} if spec.get("bidirectional") else set()
    return taken


def _numbers(tree: Any) -> Iterator[int]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _numbers(branch)
    elif isinstance(tree, int) and not isinstance(tree, bool):
        yield tree


def with_attention(sizes: Sizes, step: Step) -> dict[str, int]:
    """L and H as the decoder's attention has them: a recurrent decoder has one of each, whatever its layers."""
    seen = step.attention and (step.attention.cross if step.attention.cross is not None else step.attention.past)
    result = dict(sizes)
    for axis, name in enumerate("LH", 1) if seen is not None else ():
        if name in sizes and sizes[name] != seen.size(axis):  # type: ignore[union-attr]
            result.setdefault(name + "'", sizes[name])
        result[name] = seen.size(axis)  # type: ignore[union-attr]
    return result
