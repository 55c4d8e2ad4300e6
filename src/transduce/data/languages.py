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
    languages: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], temperature: float
) -> list[float]:
    """Weights of corpora under which languages occur in proportion to p^(1 / temperature) (Arivazhagan et al. 2019).

    p is the share of a language in all pairs, by the given weights. The number of pairs in an epoch does not change.
    """
    amounts: dict[Any, float] = {}
    for language, size, weight in zip(languages, sizes, weights, strict=True):
        amounts[language] = amounts.get(language, 0.0) + size * weight
    total = sum(amounts.values())
    flat = {language: (amount / total) ** (1 / temperature) for language, amount in amounts.items() if amount}
    factors = {language: total * share / sum(flat.values()) / amounts[language] for language, share in flat.items()}
    return [weight * factors.get(language, 1.0) for language, weight in zip(languages, weights, strict=True)]
