"""Recipes and runs in, trained runs that may be compared out: same data, same tokenizers, same size where asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from transduce import shelves
from transduce.comparison.resize import count_parameters, match_parameters
from transduce.data.batching import Position
from transduce.errors import InputError
from transduce.experiment import settle, train
from transduce.experiment.settling import as_found
from transduce.prepare import Tokenizers, prepare, train_tokenizers
from transduce.recipe import Recipe
from transduce.recipe import load as load_recipe
from transduce.run import Run
from transduce.training.fetching import fingerprint

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
    begins = prepare(recipe, tokenizers).batches(recipe, tokenizers).at(Position())
    return newest is not None and newest.facts["identity"]["data"] == fingerprint(begins)


def _forget_peak() -> None:
    """The greatest use of memory is kept by the process: what one training used must not count for the next."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # not Linux, or not allowed: then later numbers are upper bounds
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
