"""Languages of multilingual data: tags before sources, corpora by language, and temperature sampling.

A source begins with the tag of the language of its target, `<2de> a house` (Johnson et al. 2017). In the source
vocabulary a tag is one token, which stands for no text, so no output can contain it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transduce.errors import InputError

NAME = re.compile(r"\w[\w-]*")
_TAG = re.compile(r"<2(\w[\w-]*)> ?")


def tag_of(language: str) -> str:
    return f"<2{language}>"


def tagged(text: str, language: str) -> str:
    """The source of a pair whose target has this language."""
    return f"{tag_of(language)} {text}"


def split_language(text: str) -> tuple[str | None, str]:
    """The language that a source is tagged with, or None, and the text after the tag."""
    found = _TAG.match(text)
    return (None, text) if found is None else (found[1], text[found.end() :])


def check_name(name: str, where: str) -> str:
    if NAME.fullmatch(name) is None:
        raise InputError(
            f"{name!r} is no name of a language",
            where=where,
            remedy="use letters, digits, _ and -, as in de, deu or pt-BR",
        )
    return name


def temperature_weights(
    groups: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], temperature: float
) -> list[float]:
    """Weights of corpora under which groups occur in proportion to p^(1 / temperature) (Arivazhagan et al. 2019).

    A group is a language, or some corpora of it. p is its share in all pairs, by the given weights. The number of pairs
    in an epoch does not change.
    """
    amounts: dict[Any, float] = {}
    for group, size, weight in zip(groups, sizes, weights, strict=True):
        amounts[group] = amounts.get(group, 0.0) + size * weight
    total = sum(amounts.values())
    flat = {group: (amount / total) ** (1 / temperature) for group, amount in amounts.items() if amount}
    factors = {group: total * share / sum(flat.values()) / amounts[group] for group, share in flat.items()}
    return [weight * factors.get(group, 1.0) for group, weight in zip(groups, weights, strict=True)]
