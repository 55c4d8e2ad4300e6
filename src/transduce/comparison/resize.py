"""A model recipe and a number of parameters in, the same model of that size out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from transduce import build
from transduce.recipe import ModelRecipe

CLOSE = 0.03  # parameter counts that differ by less are called equal


def count_parameters(model: ModelRecipe, source_size: int, target_size: int) -> int:
    with torch.device("meta"):  # shapes without numbers: no memory, no time
        return build.count_parameters(build.build_model(model, source_size, target_size))


def match_parameters(model: ModelRecipe, wanted: int, source_size: int, target_size: int) -> ModelRecipe:
    """The same model with other widths, and `hidden` in proportion, so that it has about `wanted` parameters.

    All widths are multiples of one step, so that equal ones stay equal and heads have an even width. Where that is too
    coarse, `hidden` leaves its proportion to come closer.
    """
    step = math.lcm(2, *(2 * heads for heads in _options(model, "heads")))
    widest, most = max(_options(model, "width")), max(_options(model, "hidden"), default=0)

    def size(changed: ModelRecipe) -> int:
        return count_parameters(changed, source_size, target_size)

    def by_width(number: int) -> ModelRecipe:
        return _resize(model, number * step / widest, number * step / widest, step)

    number = _nearest(lambda n: size(by_width(n)), wanted)
    chosen = by_width(number)
    if most and abs(size(chosen) - wanted) > CLOSE * wanted:

        def by_hidden(n: int) -> ModelRecipe:
            return _resize(model, number * step / widest, 2 * n / most, step)

        chosen = by_hidden(_nearest(lambda n: size(by_hidden(n)), wanted))
    return chosen


def _options(part: Any, name: str) -> Iterator[int]:
    """Every value of an option of this name, in the parts and in the parts of parts."""
    content = part.model_dump() if isinstance(part, ModelRecipe) else part
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from [value] if key == name else _options(value, name)


def _resize(model: ModelRecipe, width: float, hidden: float, step: int) -> ModelRecipe:
    """Widths and hidden widths times these factors, rounded to whole steps."""

    def resize(spec: Any) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        new = {key: resize(value) for key, value in spec.items()}
        if "width" in new:
            new["width"] = step * max(1, round(new["width"] * width / step))
        if "hidden" in new:
            new["hidden"] = 2 * max(1, round(new["hidden"] * hidden / 2))
        return new

    return model.model_copy(update={name: resize(getattr(model, name)) for name in ("encoder", "decoder", "head")})


def _nearest(count: Callable[[int], int], wanted: int) -> int:
    """The number from 1 on whose count, which grows with it, comes nearest."""
    high = 1
    while count(high) < wanted:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < wanted else (low, middle)
    return min((low, high), key=lambda number: abs(count(number) - wanted))
