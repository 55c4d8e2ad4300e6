"""Transliteration of invented Russian-like words into Latin letters.

Most letters have one equivalent. These depend on their neighbours:

    е          ye at the beginning, after a vowel, ь or ъ; else e
    ё          o after ж ч ш щ; else yo
    ь, ъ       nothing; but a y before и and о
    ий, ый     y at the end of a word
    ого, его   ovo, evo at the end of a word, as pronounced
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

LETTERS = dict(zip("абвгдзийклмнопрстуфыэ", "abvgdziyklmnoprstufye", strict=True))
LETTERS |= {"ж": "zh", "х": "kh", "ц": "ts", "ч": "ch", "ш": "sh", "щ": "shch", "ю": "yu", "я": "ya"}
VOWELS, CONSONANTS = "аеёиоуыэюя", "бвгджзклмнпрстфхцчшщ"
SOFT = "еёиюя"  # vowels allowed after ь and ъ
ENDINGS = ("", "", "", "", "а", "ов", "ский", "ный", "ого", "его", "ость", "ия", "ье")


def transliterate(word: str) -> str:
    """The transliteration of a lower-case word."""
    word = re.sub("[иы]й$", "ы", word)  # transliterated as y
    word = re.sub("([ое])го$", r"\1во", word)
    return "".join(_letter(word, place) for place in range(len(word)))


def _letter(word: str, place: int) -> str:
    letter, before, after = word[place], word[place - 1] if place else "", word[place + 1 : place + 2]
    if letter == "е":
        return "ye" if not before or before in VOWELS + "ьъ" else "e"
    if letter == "ё":
        return "o" if before and before in "жчшщ" else "yo"
    if letter in "ьъ":
        return "y" if after and after in "ио" else ""
    return LETTERS[letter]


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Words are held out."""
    while True:
        word = "".join(_syllable(rng) for _ in range(rng.randint(1, 3)))
        word = word.rstrip("ьъ") if (end := rng.choice(ENDINGS)) else word.rstrip("ъ")
        word += end
        if len(word) >= 3 and is_held_out(word) == held_out:
            yield Example(word, transliterate(word))


def _syllable(rng: random.Random) -> str:
    """A vowel, mostly with consonants before and after it, sometimes with ь or ъ."""
    first = rng.choice(CONSONANTS) if rng.random() < 0.8 else ""
    if first and rng.random() < 0.15:
        first += rng.choice("ьъ")
    vowel = rng.choice(SOFT if first[-1:] in ("ь", "ъ") else VOWELS)
    last = rng.choice(CONSONANTS + "йй") if rng.random() < 0.4 else ""
    return first + vowel + last + ("ь" if last not in ("", "й") and rng.random() < 0.2 else "")
