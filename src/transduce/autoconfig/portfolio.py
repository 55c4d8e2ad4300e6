"""Portfolio of recipes: variants of a recipe that a search compares on the development set, and efforts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transduce.autoconfig.sizes import LETTERS, MONOTONIC
from transduce.errors import InputError
from transduce.recipe import Recipe, parse

EFFORTS = ("quick", "normal", "best")
QUICK_SHARE = 1 / 5  # of the updates and of the time
NORMAL = "normal"


@dataclass(frozen=True)
class Variant:
    """A recipe with a name."""

    name: str
    recipe: Recipe


def shortened(recipe: Recipe, share: float, given: Sequence[str] = ()) -> Recipe:
    """The recipe with a share of its updates, time and warm-up; the keys in `given`, as `training.steps`, are kept."""
    training = recipe.training
    steps = max(1, round(training.steps * share))
    check = max(1, min(round(training.validate_every * share), steps))
    changes: dict[str, Any] = {
        "steps": steps,
        "minutes": None if training.minutes is None else training.minutes * share,
        "validate_every": check,
        "checkpoint_every": check,
        "schedule": training.schedule.model_copy(update={"warmup": round(training.schedule.warmup * share)}),
    }
    kept = {name: value for name, value in changes.items() if not any(_is(key, f"training.{name}") for key in given)}
    return recipe.model_copy(update={"training": training.model_copy(update=kept)})


def _is(key: str, name: str) -> bool:
    return f"{key}.".startswith(f"{name}.")


def with_effort(recipe: Recipe, effort: str, overrides: Sequence[str]) -> Recipe:
    """The recipe that an effort begins with: shortened where it is quick, except for keys that the user gave."""
    if effort not in EFFORTS:
        raise InputError(f"unknown effort {effort!r}", where="--effort", remedy=", ".join(EFFORTS))
    given = [item.partition("=")[0] for item in overrides]
    return shortened(recipe, QUICK_SHARE, given) if effort == "quick" else recipe


def portfolio(recipe: Recipe) -> list[Variant]:
    """The completed recipe itself, which is first, and variants with the same data, tokens and metrics.

    Letters: networks of the record `benchmarks/results/autoconfig.jsonl`. Other texts: widths and dropout. If
    weights are initialised, or a source is not one text, the network stays and dropout varies.
    """
    model, init = recipe.model, recipe.init
    resizable = not (init.model or init.encoder or init.decoder or recipe.data.sources)
    if resizable and recipe.tokens.source.kind == "chars" and model.encoder and model.decoder and not model.copy:
        changes = _letters()
    else:
        changes = _sizes(model.model_dump(mode="json"), resizable)
    content = recipe.model_dump(mode="json")
    variants = [Variant(NORMAL, recipe)]
    for name, change in changes.items():
        training = {**content["training"], **change.get("training", {})}
        found = parse({**content, "model": change["model"], "training": training})
        if found.model != model:
            variants.append(Variant(name, found))
    return variants


def _sizes(model: dict[str, Any], resizable: bool) -> dict[str, dict[str, Any]]:
    """Other rates of dropout, and other widths where the network may change."""
    changes = {f"dropout {rate}": {"model": _scaled(model, ("dropout",), 0, rate)} for rate in (0.1, 0.2, 0.3)}
    if resizable:
        for name, factor in (("twice as wide", 2.0), ("half as wide", 0.5)):
            changes[name] = {"model": _scaled(model, ("width", "ff_width"), factor)}
    return changes


def _letters() -> dict[str, dict[str, Any]]:
    """The recorded networks for letters, with their rates, batches and smoothing."""
    return {
        one.record[1]: {
            "model": one.model,
            "training": {
                "optimiser": {"learning_rate": one.learning_rate},
                "batch_tokens": one.batch_tokens,
                "objective": {"kind": "cross_entropy", "label_smoothing": one.label_smoothing},
            },
        }
        for table in (LETTERS, MONOTONIC)
        for candidates in table.values()
        for one in candidates
        if one.record[1]
    }


def _scaled(tree: Any, options: Sequence[str], factor: float, plus: float = 0) -> Any:
    """A tree of parts in which every number of these names is multiplied, and increased."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        name: type(value)(value * factor + plus)
        if name in options and isinstance(value, int | float)
        else _scaled(value, options, factor, plus)
        for name, value in tree.items()
    }
