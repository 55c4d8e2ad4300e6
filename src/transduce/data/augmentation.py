"""Augmentation of training pairs: artificial examples, as a corpus beside those that are given.

Artificial examples are made once, from the pairs that are trained on, and stored like any corpus: never from held-out
pairs, and the same ones after a run was resumed. Tokenizers are trained without them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import cycle, islice, pairwise
from typing import Annotated

from annotated_types import Ge, Gt, Le

from transduce.contracts import Augmentation, Count
from transduce.data.languages import split_language, tagged
from transduce.flow import Example

ARTIFICIAL = "artificial examples"  # where an error or a report names a file
Stem = tuple[int, int, int]  # where it begins in the lemma, where in the form, and its length


@dataclass(frozen=True)
class ArtificialCorpus:
    """Artificial examples that take the place of a file."""

    examples: tuple[Example, ...]
    source_parts: int = 1
    language: str | None = None  # of the targets, where sources are tagged
    weight: float = 1.0
    format: str = "pairs"
    group: str | None = None

    @property
    def fingerprint(self) -> str:
        content = [[example.source, example.target] for example in self.examples]
        return hashlib.sha256(json.dumps([self.source_parts, content]).encode()).hexdigest()


def augmented(
    augmentation: Augmentation, examples: Sequence[Example], seed: int, source_parts: int
) -> list[ArtificialCorpus]:
    """The artificial examples for these training pairs, those of each language from its own pairs."""
    languages: dict[str | None, list[Example]] = {}
    for example in examples:
        language, source = split_language(example.source)
        languages.setdefault(language, []).append(replace(example, source=source))
    return [
        _artificial(augmentation(languages[language], random.Random(f"augmentation {seed}")), source_parts, language)
        for language in sorted(languages, key=str)
    ]


def _artificial(made: Iterable[Example], source_parts: int, language: str | None) -> ArtificialCorpus:
    rows = (one if language is None else replace(one, source=tagged(one.source, language)) for one in made)
    numbered = (replace(one, file=ARTIFICIAL, line=line) for line, one in enumerate(rows, 1))
    return ArtificialCorpus(tuple(numbered), source_parts, language)


class Hallucination(Augmentation):
    """inflections of artificial lemmas: random letters inside the stem (Anastasopoulos & Neubig 2019)

    A stem is a string of at least `min_stem` characters that lemma and form have in common. Each letter inside it, but
    not the first and the last, is replaced with probability `rate`, at least one of them, by a letter of the training
    data, the same in lemma and form. Features, and letters outside stems, stay; with `keep_vowels` vowels stay too, and
    with them vowel harmony. The lemma is the first source.
    """

    def __init__(
        self,
        *,
        examples: Count = 10_000,
        min_stem: Annotated[int, Ge(3)] = 3,
        rate: Annotated[float, Gt(0), Le(1)] = 0.5,
        keep_vowels: bool = False,
    ) -> None:
        self.examples, self.min_stem, self.rate, self.keep_vowels = examples, min_stem, rate, keep_vowels

    def __call__(self, examples: Sequence[Example], rng: random.Random) -> Iterator[Example]:
        alphabet = Alphabet(examples, vowels_of(_words(examples)) if self.keep_vowels else frozenset())
        found = [(one, positions) for one in examples if (positions := self._replaceable(one, alphabet))]
        for example, positions in islice(cycle(found), self.examples):
            chosen = [pair for pair in positions if rng.random() < self.rate] or [rng.choice(positions)]
            yield _with_letters(example, chosen, alphabet, rng)

    def _replaceable(self, example: Example, alphabet: Alphabet) -> list[tuple[int, int]]:
        """The letters inside stems that could be others, as positions in lemma and form."""
        lemma, form = _lemma(example), example.target or ""
        inner = [
            (source + offset, target + offset)
            for source, target, length in common_stems(lemma, form, self.min_stem)
            for offset in range(1, length - 1)
        ]
        return [pair for pair in inner if alphabet.others(lemma[pair[0]])]


def common_stems(lemma: str, form: str, min_length: int) -> list[Stem]:
    """The longest common substring, then those to the left and to the right of it, of at least `min_length`."""
    blocks = SequenceMatcher(None, lemma, form, autojunk=False).get_matching_blocks()
    return [(block.a, block.b, block.size) for block in blocks if block.size >= min_length]


class Alphabet:
    """The letters of lemmas and forms, less some that stay. Marks, digits and punctuation stay; case is kept."""

    def __init__(self, examples: Sequence[Example], kept: frozenset[str] = frozenset()) -> None:
        letters = {one for word in _words(examples) for one in word if one.isalpha() and one.lower() not in kept}
        self._kept = kept
        self._letters = {case: sorted(one for one in letters if one.isupper() == case) for case in (False, True)}

    def others(self, letter: str) -> list[str]:
        """What may replace a letter; empty where it stays."""
        if not letter.isalpha() or letter.lower() in self._kept:
            return []
        return [one for one in self._letters[letter.isupper()] if one != letter]


def vowels_of(words: Iterable[str]) -> frozenset[str]:
    """The vowels, in lower case, by the algorithm of Sukhotin (1962): vowels and consonants tend to alternate."""
    adjacent: Counter[tuple[str, str]] = Counter()
    for word in words:
        for one, other in pairwise(word.lower()):
            if one != other and one.isalpha() and other.isalpha():
                adjacent.update([(one, other), (other, one)])
    neighbours: Counter[str] = Counter()  # of each letter that is not a vowel: consonants less vowels
    for (one, _), count in adjacent.items():
        neighbours[one] += count
    found = set[str]()
    while neighbours:
        vowel = max(neighbours, key=lambda letter: (neighbours[letter], letter))
        if neighbours.pop(vowel) <= 0:
            break
        found.add(vowel)
        for letter in neighbours:
            neighbours[letter] -= 2 * adjacent[vowel, letter]
    return frozenset(found)


def _words(examples: Iterable[Example]) -> list[str]:
    return [word for example in examples for word in (_lemma(example), example.target or "")]


def _lemma(example: Example) -> str:
    return example.source.partition("\t")[0]


def _with_letters(
    example: Example, positions: Sequence[tuple[int, int]], alphabet: Alphabet, rng: random.Random
) -> Example:
    """The example with random letters at these positions of lemma and form."""
    source, target = list(example.source), list(example.target or "")
    for one, other in positions:
        source[one] = target[other] = rng.choice(alphabet.others(source[one]))
    return replace(example, source="".join(source), target="".join(target), extra={})


AUGMENTATIONS: dict[str, type[Augmentation]] = {"hallucination": Hallucination}
