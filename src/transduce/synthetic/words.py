"""Chance enters; pronounceable words that nobody has seen leave, each for ever on one side of the split."""

from __future__ import annotations

import random
from zlib import crc32

HELD_OUT = 5  # one word in five is never trained on


def is_held_out(word: str) -> bool:
    """A property of the word alone: no seed moves it to the other side."""
    return crc32(word.encode()) % HELD_OUT == 0


def invent_name(chance: random.Random, held_out: bool) -> str:
    """A name of two or three syllables, with a capital: Dorava."""
    while True:
        syllables = (
            chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") + chance.choice(("", "", "", "n", "r", "l", "s"))
            for _ in range(chance.randint(2, 3))
        )
        name = "".join(syllables).capitalize()
        if is_held_out(name) == held_out:
            return name


def invent_names(chance: random.Random, held_out: bool, count: int) -> list[str]:
    """Different ones."""
    names = dict[str, None]()
    while len(names) < count:
        names[invent_name(chance, held_out)] = None
    return list(names)
