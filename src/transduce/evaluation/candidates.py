"""Candidates of a comparison: loading, shared tokenizers, parameter matching, training."""

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
from transduce.build import meta_device
from transduce.data.prepare import Tokenizers, train_tokenizers
from transduce.errors import InputError
from transduce.recipe import ModelRecipe, Recipe, registry
from transduce.recipe import load as load_recipe
from transduce.run import Run
from transduce.training.experiment import is_finished, train
from transduce.training.resolve import resolve

PARAMETER_TOLERANCE = 0.03  # relative difference of parameter counts that count as equal


def count_parameters(model: ModelRecipe, source_size: int, target_size: int) -> int:
    with meta_device():
        return build.count_parameters(build.build_model(model, source_size, target_size))


def match_parameters(model: ModelRecipe, target: int, source_size: int, target_size: int) -> ModelRecipe:
    """The same model with other widths, and `ff_width` in proportion, so that it has about `target` parameters.

    All widths are multiples of one step, so that equal widths stay equal and heads have an even width. If that is too
    coarse, `ff_width` alone is changed to come closer.
    """
    step = math.lcm(2, *(2 * heads for heads in _options(model, "heads")))
    widest, max_ff_width = max(_options(model, "width")), max(_options(model, "ff_width"), default=0)

    def size(changed: ModelRecipe) -> int:
        return count_parameters(changed, source_size, target_size)

    def by_width(number: int) -> ModelRecipe:
        return _resize(model, number * step / widest, number * step / widest, step)

    number = _nearest_size(lambda n: size(by_width(n)), target)
    chosen = by_width(number)
    if max_ff_width and abs(size(chosen) - target) > PARAMETER_TOLERANCE * target:

        def by_ff_width(n: int) -> ModelRecipe:
            return _resize(model, number * step / widest, 2 * n / max_ff_width, step)

        chosen = by_ff_width(_nearest_size(lambda n: size(by_ff_width(n)), target))
    return chosen


def _options(part: Any, name: str) -> Iterator[int]:
    """All values of an option of this name, in nested parts too."""
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


def _nearest_size(count: Callable[[int], int], target: int) -> int:
    """The positive number whose count, an increasing function, is nearest to the target."""
    high = 1
    while count(high) < target:
        high *= 2
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < target else (low, middle)
    return min((low, high), key=lambda number: abs(count(number) - target))


Equal = Literal["none", "parameters", "minutes"]


@dataclass(frozen=True)
class Candidate:
    """One system of a comparison: an existing run, or a recipe and the run to train."""

    name: str
    run: Run
    recipe: Recipe  # completed
    is_run: bool  # an existing run, neither trained nor resized


def time_limits(equal: Equal, minutes: float | None) -> list[str]:
    """Recipe overrides. Equal time excludes early stopping; the schedule still follows the number of updates."""
    overrides = [] if minutes is None else [f"training.minutes={minutes}"]
    return [*overrides, "training.patience=null"] if equal == "minutes" else overrides


def load_candidates(paths: Sequence[str | Path], folder: Path, overrides: Sequence[str]) -> list[Candidate]:
    """Run directories as they are, recipes with the overrides; names are made unique."""
    if not paths:
        raise InputError("nothing to compare", remedy="give recipes and run directories")
    candidates: dict[str, Candidate] = {}
    for path in map(Path, paths):
        is_run = path.is_dir()
        base = path.resolve().name if is_run else path.stem
        names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(paths) + 1))
        name = next(name for name in names if name not in candidates)
        run = Run(path if is_run else folder / name)
        recipe = run.recipe() if is_run else resolve(load_recipe(path, overrides))
        if is_run and (own := registry.user_classes(recipe)):  # code of a run directory is not executed
            raise InputError(
                f"this run needs code of its own: {', '.join(own)}", where=str(path), remedy="give its recipe"
            )
        candidates[name] = Candidate(name, run, recipe, is_run)
    return list(candidates.values())


def check_data(candidates: Sequence[Candidate]) -> None:
    """Raises an error if the held-out data of one candidate could be training data of another."""
    first, *others = candidates
    split = not (first.recipe.data.test or first.recipe.data.dev)  # the split also depends on the seed and tokens
    for other in others:
        pairs = [(f"data.{key}", value, getattr(other.recipe.data, key)) for key, value in first.recipe.data]
        if split:
            pairs.append(("training.seed", first.recipe.training.seed, other.recipe.training.seed))
            pairs.append(("tokens", first.recipe.tokens, other.recipe.tokens))
        differing = [key for key, a, b in pairs if a != b and key not in ("data.test", "data.cache")]
        if differing:
            raise InputError(
                f"{first.name} and {other.name} differ in {', '.join(differing)}: "
                "held-out data of one may be training data of the other",
                remedy="train both on the same data, or give held-out pairs that neither was trained on (--data FILE)",
            )


def share_tokenizers(candidates: Sequence[Candidate]) -> None:
    """Saves the tokenizers of every new run; equal settings on equal data share tokenizers, trained once."""
    known: dict[str, Tokenizers] = {}
    for candidate in sorted(candidates, key=lambda one: not one.run.exists):  # existing tokenizers are reused
        recipe, run = candidate.recipe, candidate.run
        key = repr((recipe.data.train, recipe.data.invalid, recipe.tokens))
        if run.exists:
            known.setdefault(key, run.tokenizers())
            continue
        known[key] = known.get(key) or train_tokenizers(recipe)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.save_tokenizers(*known[key])


def equalise_parameters(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Resizes the recipes to the number of parameters of the first candidate."""
    first, *others = candidates
    sizes = [tuple(tokenizer.size for tokenizer in one.run.tokenizers()) for one in candidates]
    parameters = count_parameters(first.recipe.model, *sizes[0])
    result = [first]
    for other, (source, target) in zip(others, sizes[1:], strict=True):
        if not other.is_run:
            model = match_parameters(other.recipe.model, parameters, source, target)
            other = replace(other, recipe=other.recipe.model_copy(update={"model": model}))
        result.append(other)
    return result


def train_candidate(candidate: Candidate, console: Console) -> None:
    """Trains a recipe unless its run is finished."""
    if candidate.is_run or is_finished(candidate.run, candidate.recipe):
        console.print(f"{candidate.name}: using the run in {candidate.run.folder}", markup=False, highlight=False)
        return
    console.print(f"{candidate.name}: training", markup=False, highlight=False)
    _reset_peak_memory()
    outcome = train(candidate.recipe, candidate.run.folder, resume=True, console=console).outcome
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt(f"training of {candidate.name} was interrupted after update {outcome.step}")


def _reset_peak_memory() -> None:
    """Resets the peak memory of the process, so that it does not include earlier training runs."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # not Linux, or not permitted: later numbers are upper bounds then
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
