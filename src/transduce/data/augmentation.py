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
from unicodedata import normalize

from annotated_types import Ge, Gt, Le

from transduce.contracts import Augmentation, Count
from transduce.data.languages import split_language, tagged
from transduce.data.tokenizers.vocabulary import split_tags
from transduce.flow import Example

ARTIFICIAL = "artificial examples"  # where an error or a report names a file
Share = Annotated[float, Ge(0), Le(1)]
VOWELS, SEMIVOWELS = frozenset("aeiouyæøœıəаеиоуыэюяієαεηιουω"), frozenset("йў")  # without accents
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
    data, the same in lemma and form; with `replace_edges` the first and the last one too. Features, and letters outside
    stems, stay; with `keep_vowels` vowels stay too, and with them vowel harmony. An example without a stem stays as it
    is, so that all examples have the same share. The lemma is the first source.

    With probability `exchange` the beginning of the longest stem, which ends before its last vowel, is first replaced
    by the beginning of another lemma. The share `citations` of the examples has the lemma as its form, with the
    features of a citation form.
    """

    def __init__(
        self,
        *,
        examples: Count = 10_000,
        min_stem: Annotated[int, Ge(3)] = 3,
        rate: Annotated[float, Gt(0), Le(1)] = 0.5,
        keep_vowels: bool = False,
        replace_edges: bool = False,
        exchange: Share = 0.0,
        citations: Share = 0.0,
    ) -> None:
        self.examples, self.min_stem, self.rate, self.keep_vowels = examples, min_stem, rate, keep_vowels
        self.replace_edges, self.exchange, self.citations = replace_edges, exchange, citations

    def __call__(self, examples: Sequence[Example], rng: random.Random) -> Iterator[Example]:
        vowels = vowels_of(_words(examples))
        alphabet = Alphabet(examples, vowels if self.keep_vowels else frozenset())
        if not any(self._replaceable(one, alphabet) for one in examples):
            return
        beginnings, irregular = Beginnings(examples, vowels), _irregular_citations(examples)
        for example in islice(cycle(examples), self.examples):
            if rng.random() < self.exchange:
                example = beginnings.exchanged(example, rng)
            positions = self._replaceable(example, alphabet)
            chosen = [pair for pair in positions if rng.random() < self.rate] or _one_of(positions, rng)
            made = _with_letters(example, chosen, alphabet, rng)
            features = citation_features(made)
            cited = rng.random() < self.citations and features and features not in irregular
            yield replace(made, source=f"{_lemma(made)}\t{features}", target=_lemma(made)) if cited else made

    def _replaceable(self, example: Example, alphabet: Alphabet) -> list[tuple[int, int]]:
        """The letters of stems that could be others, as positions in lemma and form."""
        lemma, form = _lemma(example), example.target or ""
        letters = [
            (source + offset, target + offset)
            for source, target, length in common_stems(lemma, form, self.min_stem)
            for offset in self._offsets(form, target, length)
        ]
        return [pair for pair in letters if alphabet.others(lemma[pair[0]])]

    def _offsets(self, form: str, start: int, length: int) -> range:
        """The letters of a stem that may be replaced; not the last, where the form repeats it after the stem."""
        if not self.replace_edges:
            return range(1, length - 1)
        end = start + length
        return range(length - (form[end : end + 1] == form[end - 1]))


class Beginnings:
    """Beginnings of words, which take the place of those of stems."""

    def __init__(self, examples: Sequence[Example], vowels: frozenset[str]) -> None:
        self._words, self._vowels = [_lemma(one) for one in examples], vowels

    def exchanged(self, example: Example, rng: random.Random) -> Example:
        """The example with another beginning of its longest stem; unchanged where the stem is too short.

        The last vowel of the stem and what follows stay: suffixes may depend on them. A vowel stays after what a vowel
        stood after, and a consonant likewise.
        """
        lemma, form = _lemma(example), example.target or ""
        match = SequenceMatcher(None, lemma, form, autojunk=False).find_longest_match()
        last = max((at for at in range(match.size) if self._vowel(lemma[match.a + at])), default=0)
        if last < 1:
            return example
        cut = rng.randint(1, last)
        word = rng.choice(self._words)
        kind = self._vowel(lemma[match.a + cut])
        cuts = [at for at in range(1, len(word)) if self._vowel(word[at]) == kind]
        if not cuts or " " in word or word[0].isupper() != lemma[match.a].isupper():
            return example
        beginning = word[: rng.choice(cuts)]
        source = example.source[: match.a] + beginning + example.source[match.a + cut :]
        return replace(example, source=source, target=form[: match.b] + beginning + form[match.b + cut :])

    def _vowel(self, letter: str) -> bool:
        return letter.lower() in self._vowels


# Features of lemmas in the UniMorph schema (Sylak-Glassman 2016), by word class. The lemmas of verbs differ between
# languages: their word class stands alone.
CITATION_FEATURES = {"N": "N;NOM;SG", "ADJ": "ADJ;NOM;MASC;SG"}


def citation_features(example: Example) -> str:
    """The features with which the form of the lemma is the lemma."""
    features = split_tags(example.source.partition("\t")[2])
    word_class = features[0].partition(".")[0] if features else ""  # V of V.PTCP
    return CITATION_FEATURES.get(word_class, word_class)


def _irregular_citations(examples: Sequence[Example]) -> set[str]:
    """Features of citation forms with which no form of the data is the lemma."""
    cited: dict[str, bool] = {}
    for example in examples:
        if (features := example.source.partition("\t")[2]) == citation_features(example):
            cited[features] = cited.get(features, False) or example.target == _lemma(example)
    return {features for features, right in cited.items() if not right}


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
    """The vowels, in lower case: those of Latin, Cyrillic and Greek letters, else the letters that alternate."""
    words = [word.lower() for word in words]
    known = {one for word in words for one in word if normalize("NFD", one)[0] in VOWELS and one not in SEMIVOWELS}
    return frozenset(known) or alternating_letters(words)


def alternating_letters(words: Iterable[str]) -> frozenset[str]:
    """The vowels of an unknown alphabet by the algorithm of Sukhotin (1962): they tend to alternate with consonants."""
    adjacent: Counter[tuple[str, str]] = Counter()
    for word in words:
        for one, other in pairwise(word):
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


def _one_of(positions: Sequence[tuple[int, int]], rng: random.Random) -> list[tuple[int, int]]:
    return [rng.choice(positions)] if positions else []


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
