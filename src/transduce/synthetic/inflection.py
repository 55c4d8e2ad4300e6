"""Inflection of invented nouns by the regular rules of Turkish.

A form is stem + number + possessor + case. The letters of a suffix depend on the letters before it:

    A    a after a ı o u, else e                    D    t after a voiceless consonant, else d
    I    ı i u ü, after the last vowel              (y)  only after a vowel; (I) only after a consonant

A polysyllabic stem in p ç t k has b c d ğ before a vowel, and nk becomes ng. The possessor p3 takes an n before a case
suffix.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

VOWELS, VOICELESS = "aıoueiöü", "fstkçşhp"
HIGH = dict(zip("aıoueiöü", "ııuuiiüü", strict=True))
VOICED = {"p": "b", "ç": "c", "t": "d", "k": "ğ"}
NUMBERS = {"sg": "", "pl": "lAr"}
POSSESSORS = {"": "", "p1": "(I)m", "p2": "(I)n", "p3": "(s)I"}
CASES = {"nom": "", "acc": "(y)I", "dat": "(y)A", "loc": "DA", "abl": "DAn", "gen": "(n)In"}


def inflect(lemma: str, features: str) -> str:
    """`kitap`, `pl p1 abl` -> kitaplarımdan. Features: number, an optional possessor, case."""
    number, *possessor, case = features.split()
    form = _join(lemma, NUMBERS[number])
    form = _join(form, POSSESSORS["".join(possessor)])
    ending = CASES[case]
    if possessor == ["p3"] and ending:
        ending = "n" + ending.replace("(y)", "").replace("(n)", "")
    return _join(form, ending)


def _join(stem: str, suffix: str) -> str:
    if not suffix:
        return stem
    if suffix.startswith("("):  # a buffer letter between two vowels or two consonants
        buffer, suffix = suffix[1], suffix[3:]
        if (stem[-1] in VOWELS) != (buffer in "AI"):
            suffix = buffer + suffix
    if suffix[0] in "AI":
        stem = _voiced(stem)
    for letter in suffix:
        stem += _harmonised(stem, letter)
    return stem


def _harmonised(before: str, letter: str) -> str:
    vowel = next(one for one in reversed(before) if one in VOWELS)
    if letter == "A":
        return "a" if vowel in "aıou" else "e"
    if letter == "I":
        return HIGH[vowel]
    if letter == "D":
        return "t" if before[-1] in VOICELESS else "d"
    return letter


def _voiced(stem: str) -> str:
    if stem.endswith("nk"):
        return stem[:-1] + "g"
    polysyllabic = sum(letter in VOWELS for letter in stem) > 1
    return stem[:-1] + VOICED[stem[-1]] if polysyllabic and stem[-1] in VOICED else stem


def generate(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Lemmas are held out."""
    while True:
        lemma = _lemma(rng)
        if is_held_out(lemma) == held_out:
            number, possessor, case = (rng.choice(list(table)) for table in (NUMBERS, POSSESSORS, CASES))
            features = " ".join(part for part in (number, possessor, case) if part)
            yield Example(f"{lemma}\t{features}", inflect(lemma, features))


def _lemma(rng: random.Random) -> str:
    """One to three syllables in vowel harmony: all vowels are back vowels, or all are front vowels."""
    vowels = rng.choice(("aıou", "eiöü"))
    lemma = rng.choice(("", "b", "d", "g", "k", "m", "s", "t", "y", "ç"))
    syllables = rng.randint(1, 3)
    for number in range(syllables):
        lemma += rng.choice(vowels)
        if number < syllables - 1:
            lemma += rng.choice(("b", "d", "l", "m", "n", "r", "ş", "t", "z", "ld", "rk", "ns"))
    if syllables == 1 or rng.random() < 0.7:
        lemma += rng.choice(("k", "p", "t", "ç", "l", "m", "n", "r", "s", "z", "ş", "nk"))
    return lemma
