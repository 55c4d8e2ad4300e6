"""Portfolio of recipes: variants of a recipe that a search compares on the development set, and efforts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transduce.errors import InputError
from transduce.recipe import Recipe, parse

EFFORTS = ("quick", "normal", "best")
QUICK_SHARE = 1 / 5  # of the updates and of the time
NORMAL = "normal"
SMOOTH = {"kind": "cross_entropy", "label_smoothing": 0.1}


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

    Letters: the networks that were best in `benchmarks/results/autoconfig.jsonl`. Other texts: widths and dropout. If
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
    """The variants of benchmarks/autoconfig.py that were best for 800 or 8,000 words, and one of each architecture."""

    def recurrent(cell: str, layers: int, context: str) -> dict[str, Any]:
        part = {"kind": "recurrent", "cell": cell, "width": 256, "layers": layers, "dropout": 0.4}
        return {"encoder": part, "decoder": {**part, "context": context}}

    def training(rate: float, batch: int) -> dict[str, Any]:
        return {"optimiser": {"learning_rate": rate}, "batch_tokens": batch, "objective": SMOOTH}

    part = {"kind": "transformer", "width": 256, "layers": 4, "heads": 4, "ff_width": 1024, "dropout": 0.3}
    rotary = {**part, "position": "rotary"}
    read = {"width": 256, "cell": "lstm", "dropout": 0.4}
    hard = {"kind": "hard_attention", "layers": 1, **read}
    return {
        "transformer 256 x 4, rotary": {
            "model": {"encoder": rotary, "decoder": rotary, "tie": "target"},
            "training": training(1e-3, 4096),
        },
        "lstm 256 x 2": {"model": recurrent("lstm", 2, "bahdanau"), "training": training(1e-3, 2048)},
        "lstm 256, luong": {"model": recurrent("lstm", 1, "luong"), "training": training(1e-3, 2048)},
        "gru 256": {"model": recurrent("gru", 1, "bahdanau"), "training": training(2e-3, 2048)},
        "hard attention": {
            "model": {"encoder": {"kind": "recurrent", "layers": 2, **read}, "decoder": hard},
            "training": training(1e-3, 2048),
        },
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
