"""Recipes and runs in, trained runs that may be compared out: same data, same tokenizers, same size where asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from transduce import build
from transduce.data.batching import DataPosition
from transduce.data.prepare import Tokenizers, prepare_data, train_tokenizers
from transduce.errors import InputError
from transduce.recipe import ModelRecipe, Recipe
from transduce.recipe import load as load_recipe
from transduce.recipe import registry as shelves
from transduce.run import Run
from transduce.training.experiment import train
from transduce.training.feed import fingerprint
from transduce.training.resolve import as_found, settle

CLOSE = 0.03  # parameter counts that differ by less are called equal


def count_parameters(model: ModelRecipe, source_size: int, target_size: int) -> int:
    with torch.device("meta"):  # shapes without numbers: no memory, no time
        return build.count_parameters(build.build_model(model, source_size, target_size))


def match_parameters(model: ModelRecipe, wanted: int, source_size: int, target_size: int) -> ModelRecipe:
    """The same model with other widths, and `ff_width` in proportion, so that it has about `wanted` parameters.

    All widths are multiples of one step, so that equal ones stay equal and heads have an even width. Where that is too
    coarse, `ff_width` leaves its proportion to come closer.
    """
    step = math.lcm(2, *(2 * heads for heads in _options(model, "heads")))
    widest, most = max(_options(model, "width")), max(_options(model, "ff_width"), default=0)

    def size(changed: ModelRecipe) -> int:
        return count_parameters(changed, source_size, target_size)

    def by_width(number: int) -> ModelRecipe:
        return _resize(model, number * step / widest, number * step / widest, step)

    number = _nearest(lambda n: size(by_width(n)), wanted)
    chosen = by_width(number)
    if most and abs(size(chosen) - wanted) > CLOSE * wanted:

        def by_ff_width(n: int) -> ModelRecipe:
            return _resize(model, number * step / widest, 2 * n / most, step)

        chosen = by_ff_width(_nearest(lambda n: size(by_ff_width(n)), wanted))
    return chosen


def _options(part: Any, name: str) -> Iterator[int]:
    """Every value of an option of this name, in the parts and in the parts of parts."""
    content = part.model_dump() if isinstance(part, ModelRecipe) else part
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from [value] if key == name else _options(value, name)


def _resize(model: ModelRecipe, width: float, ff_width: float, step: int) -> ModelRecipe:
    """Model and feed-forward widths times these factors, rounded to whole steps."""

    def resize(spec: Any) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        new = {key: resize(value) for key, value in spec.items()}
        if "width" in new:
            new["width"] = step * max(1, round(new["width"] * width / step))
        if "ff_width" in new:
            new["ff_width"] = 2 * max(1, round(new["ff_width"] * ff_width / 2))
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


Equal = Literal["none", "parameters", "minutes"]


@dataclass(frozen=True)
class Candidate:
    """What takes part: a run as it is, or a recipe and the run that is made of it."""

    name: str
    run: Run
    recipe: Recipe  # completed
    given: bool  # a run directory: neither trained nor resized


def limits(equal: Equal, minutes: float | None) -> list[str]:
    """With equal time nobody leaves early. The number of updates stays: the learning rate is planned by it."""
    limits = [] if minutes is None else [f"training.minutes={minutes}"]
    return [*limits, "training.patience=null"] if equal == "minutes" else limits


def take(
    candidates: Sequence[str | Path], folder: Path, overrides: Sequence[str], limits: list[str]
) -> list[Candidate]:
    if not candidates:
        raise InputError("nothing to compare", remedy="give recipes and run directories")
    taken: dict[str, Candidate] = {}
    for path in map(Path, candidates):
        given = path.is_dir()
        base = path.resolve().name if given else path.stem
        names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(candidates) + 1))
        name = next(name for name in names if name not in taken)
        run = Run(path if given else folder / name)
        recipe = run.recipe() if given else settle(load_recipe(path, [*overrides, *limits]))
        if given and (own := shelves.own_parts(recipe)):  # a run may come from anywhere: its code is not run
            raise InputError(
                f"this run needs code of its own: {', '.join(own)}", where=str(path), remedy="give its recipe"
            )
        taken[name] = Candidate(name, run, recipe, given)
    return list(taken.values())


def check_data(entrants: Sequence[Candidate]) -> None:
    """Refuses where lines held out of one training could have been seen in another."""
    first, *others = entrants
    split = not (first.recipe.data.test or first.recipe.data.dev)  # which pairs are held out depends on more then
    for other in others:
        pairs = [(f"data.{key}", value, getattr(other.recipe.data, key)) for key, value in first.recipe.data]
        if split:
            pairs.append(("training.seed", first.recipe.training.seed, other.recipe.training.seed))
            pairs.append(("tokens", first.recipe.tokens, other.recipe.tokens))
        differing = [key for key, a, b in pairs if a != b and key not in ("data.test", "data.cache")]
        if differing:
            raise InputError(
                f"{first.name} and {other.name} differ in {', '.join(differing)}: "
                "what one held out the other may have been trained on",
                remedy="train both on the same data, or give held-out pairs that none of them has seen (--data FILE)",
            )


def share_tokenizers(entrants: Sequence[Candidate]) -> None:
    """Gives every run its tokenizers. Equal settings on equal data have the same ones, trained once."""
    known: dict[str, Tokenizers] = {}
    for entrant in sorted(entrants, key=lambda one: not one.run.exists):  # those that have some lend them
        recipe, run = entrant.recipe, entrant.run
        key = repr((recipe.data.train, recipe.data.invalid, recipe.tokens))
        if run.exists:
            known.setdefault(key, run.tokenizers())
            continue
        known[key] = known.get(key) or train_tokenizers(recipe)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.save_tokenizers(*known[key])


def equalise(entrants: Sequence[Candidate]) -> list[Candidate]:
    first, *others = entrants
    sizes = [tuple(tokenizer.size for tokenizer in one.run.tokenizers()) for one in entrants]
    wanted = count_parameters(first.recipe.model, *sizes[0])
    result = [first]
    for other, (source, target) in zip(others, sizes[1:], strict=True):
        if not other.given:
            model = match_parameters(other.recipe.model, wanted, source, target)
            other = replace(other, recipe=other.recipe.model_copy(update={"model": model}))
        result.append(other)
    return result


def train_entrant(entrant: Candidate, console: Console) -> None:
    if entrant.given or _is_finished(entrant):
        console.print(f"{entrant.name}: taken from {entrant.run.folder}", markup=False, highlight=False)
        return
    console.print(f"{entrant.name}: training", markup=False, highlight=False)
    _forget_peak()
    outcome = train(entrant.recipe, entrant.run.folder, resume=True, console=console).outcome
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt(f"training of {entrant.name} was interrupted after update {outcome.step}")


def _is_finished(entrant: Candidate) -> bool:
    """Trained to the end, by this recipe and on this data: files can change under one name."""
    run = entrant.run
    if not (run.exists and run.metrics() and (run.checkpoints.folder / "final").is_dir()):
        return False
    recipe = as_found(run.recipe(), entrant.recipe)
    if run.recipe() != recipe:
        return False
    tokenizers, newest = run.tokenizers(), run.checkpoints.latest(only=())
    begins = prepare_data(recipe, tokenizers).batches(recipe, tokenizers).at(DataPosition())
    return newest is not None and newest.state["identity"]["data"] == fingerprint(begins)


def _forget_peak() -> None:
    """The greatest use of memory is kept by the process: what one training used must not count for the next."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # not Linux, or not allowed: then later numbers are upper bounds
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
