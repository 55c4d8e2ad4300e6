"""Nothing enters; invented nouns with features leave, with their form by the regular rules of Turkish.

A form is stem + number + possessor + case. The suffixes are written with letters that depend on what stands before:

    A    a after a ı o u, else e                    D    t after a voiceless consonant, else d
    I    ı i u ü, after the last vowel              (y)  only after a vowel; (I) only after a consonant

A stem of several syllables in p ç t k has b c d ğ before a vowel, and nk has ng. The possessor p3 keeps an n before
a case.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from transduce.flow import Example
from transduce.synthetic.words import is_held_out

VOWELS, VOICELESS = "aıoueiöü", "fstkçşhp"
HIGH = dict(zip("aıoueiöü", "ııuuiiüü", strict=True))
VOICED = {"p": "b", "ç": "c", "t": "d", "k": "ğ"}
NUMBERS = {"sg": "", "pl": "lAr"}
POSSESSORS = {"": "", "p1": "(I)m", "p2": "(I)n", "p3": "(s)I"}
CASES = {"nom": "", "acc": "(y)I", "dat": "(y)A", "loc": "DA", "abl": "DAn", "gen": "(n)In"}


def inflect(lemma: str, features: str) -> str:
    """`kitap`, `pl p1 abl` -> kitaplarımdan; number and case always, between them the possessor if there is one."""
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
    if suffix.startswith("("):  # a letter that keeps two vowels, or two consonants, apart
        between, suffix = suffix[1], suffix[3:]
        if (stem[-1] in VOWELS) != (between in "AI"):
            suffix = between + suffix
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
    several = sum(letter in VOWELS for letter in stem) > 1
    return stem[:-1] + VOICED[stem[-1]] if several and stem[-1] in VOICED else stem


def draw(chance: random.Random, held_out: bool) -> Iterator[Example]:
    """Held out are lemmas."""
    while True:
        lemma = _lemma(chance)
        if is_held_out(lemma) == held_out:
            number, possessor, case = (chance.choice(list(table)) for table in (NUMBERS, POSSESSORS, CASES))
            features = " ".join(part for part in (number, possessor, case) if part)
            yield Example(f"{lemma}\t{features}", inflect(lemma, features))


def _lemma(chance: random.Random) -> str:
    """One to three syllables whose vowels are all of the back or all of the front of the mouth."""
    vowels = chance.choice(("aıou", "eiöü"))
    lemma = chance.choice(("", "b", "d", "g", "k", "m", "s", "t", "y", "ç"))
    syllables = chance.randint(1, 3)
    for number in range(syllables):
        lemma += chance.choice(vowels)
        if number < syllables - 1:
            lemma += chance.choice(("b", "d", "l", "m", "n", "r", "ş", "t", "z", "ld", "rk", "ns"))
    if syllables == 1 or chance.random() < 0.7:
        lemma += chance.choice(("k", "p", "t", "ç", "l", "m", "n", "r", "s", "z", "ş", "nk"))
    return lemma
