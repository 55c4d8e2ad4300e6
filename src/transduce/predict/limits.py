"""What a model may be asked for: changes -> checked generation settings; a network -> how long its texts may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from torch import nn

from transduce.data.text import Tokenizer
from transduce.errors import InputError
from transduce.recipe import GenerationRecipe, Recipe, explain_error
from transduce.shortlist import Shortlist


def change_settings(settings: GenerationRecipe, changes: Mapping[str, Any]) -> GenerationRecipe:
    """The settings with all changes but None; a wrong name or value is an InputError."""
    known = settings.model_dump()
    changes = {name: value for name, value in changes.items() if value is not None}
    try:
        chosen = GenerationRecipe.model_validate({**known, **changes})
    except ValidationError as error:
        raise explain_error(error, "generate", known) from None
    if changes.get("strategy") == "sample" and "beam" not in changes:
        # One draw for each hypothesis asked for: the likeliest of several would be no fair sample.
        return chosen.model_copy(update={"beam": 1})
    several = chosen.nbest > 1 or ("beam" in changes and chosen.beam > 1)
    if chosen.strategy == "greedy" and several and "strategy" not in changes:
        return chosen.model_copy(update={"strategy": "beam"})
    return chosen


def check_draft(
    recipe: Recipe, own: Sequence[Tokenizer], wanted: Sequence[Tokenizer], chosen: GenerationRecipe, prefixes: Any
) -> None:
    """A draft reads and writes the same tokens, and serves greedy search from the beginning on."""
    if [one.fingerprint for one in own] != [one.fingerprint for one in wanted] or recipe.data.form == "text":
        raise InputError("the draft has other tokens", remedy="train both from the same data with the same `tokens`")
    if (chosen.strategy != "greedy" and chosen.beam != 1) or chosen.strategy == "sample" or chosen.nbest != 1:
        raise InputError("a draft serves greedy search", remedy="add --set strategy=greedy")
    if prefixes is not None:
        raise InputError("a draft begins where the output begins", remedy="leave out the draft, or the prefix")


def check_shortlist(shortlist: Shortlist, own: tuple[Tokenizer, Tokenizer], *, drafted: bool, alone: bool) -> None:
    """A list is of the model's own tokens, by those of a source; a draft would propose any."""
    if drafted:
        raise InputError("a draft proposes any token", remedy="leave out the draft, or the shortlist")
    if alone:
        raise InputError("a language model has no source to make a list from", remedy="leave the shortlist out")
    shortlist.check(own)


def reach(network: nn.Module, *, alone: bool, sourceless: bool) -> tuple[int, int]:
    """Most tokens of a source and of a target: learned positions end somewhere. `alone`: there is no encoder."""
    ends: dict[bool, list[int]] = {True: [2**31], False: [2**31]}  # of the decoder, of the rest
    for name, part in network.named_modules():
        if isinstance(longest := getattr(part, "longest", None), int):
            ends[name.startswith("decoder")].append(longest)
    target = min(ends[True])
    if sourceless:
        return 0, target
    # One place is for the closing </s>; a decoder alone keeps half of its places for the target.
    return (target // 2 - 1, target // 2) if alone else (min(ends[False]) - 1, target)
