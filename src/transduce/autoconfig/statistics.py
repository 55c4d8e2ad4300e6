"""Data statistics, and inspection of a data set: scripts, duplicates, overlap with test data, suspicious lines."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from transduce.data.filters import Leakage, PairHashSet, count_leakage
from transduce.data.languages import split_language
from transduce.data.readers.corpus import DropCounter, Invalid, read_corpus, text_parts
from transduce.data.readers.files import TEXT_KINDS
from transduce.errors import InputError
from transduce.evaluation.overlap_metrics import is_bio
from transduce.flow import Example
from transduce.recipe import Corpora, Corpus, DataRecipe

SAMPLE = 20_000  # pairs that are analysed; the rest is only counted

PIECES_A_WORD = 1.3  # BPE pieces, assumed
MAX_LABELS = 100  # more different targets are not taken for labels
WORDS_A_TAG = 4  # at least
LABEL_COUNT = 10  # mean number of lines with the same label
SHOWN = 10  # places that are stored for each kind of problem
MAX_RATIO = 4.0  # a pair whose ratio of lengths differs from the median by more than this factor is suspicious
MIN_CHARACTERS = 20  # of the longer side of such a pair: short texts have all ratios
BINS = 24
# UTF-8 that was read as Latin-1 or Windows-1252 ("Ã¤", "â€™"), and the replacement character.
_BAD_ENCODING = re.compile("\ufffd|[ÂÃ][\u0080-\u00bf]|â€|ï»¿")


@dataclass(frozen=True)
class SideStatistics:
    """Statistics of one side of the pairs."""

    characters: float  # median per line, which a single very long line does not change
    words: float  # median per line
    alphabet: frozenset[str]
    vocabulary: int  # distinct words in the sample
    unseen: float  # estimated share of new words in further text: words with count one (Good 1953)
    distinct: int = 0  # distinct lines in the sample
    bio_tags: bool = False  # its words are span tags: B-PER I-PER O

    @classmethod
    def of(cls, lines: Sequence[str]) -> SideStatistics:
        words = [line.split() for line in lines]
        counts = Counter(word for line in words for word in line)
        return cls(
            median(map(len, lines)),
            median(map(len, words)),
            frozenset("".join(lines)),
            len(counts),
            sum(count == 1 for count in counts.values()) / max(counts.total(), 1),
            len(set(lines)),
            is_bio(list(counts)),
        )

    @property
    def character_level(self) -> bool:
        """Single words or short strings, best modelled as characters."""
        return self.words < 2.5 or self.characters < 25

    def tokens(self, kind: str, size: int) -> tuple[int, int]:
        """Estimated size of the vocabulary and tokens a line, for a kind of tokens and a largest vocabulary."""
        if kind == "chars":
            return min(size, len(self.alphabet) + 4), max(1, round(self.characters))
        if kind == "labels":
            return self.distinct + 4, 1
        if kind == "words":
            return min(size, self.vocabulary + 4), max(1, round(self.words))
        return size, max(1, round(PIECES_A_WORD * self.words))

    @property
    def closed_vocabulary(self) -> bool:
        """Words from a small closed set: phones, actions, tags."""
        return self.words >= 2 and self.vocabulary <= 200 and self.unseen < 0.01


@dataclass(frozen=True)
class CorpusStatistics:
    """Statistics of a corpus."""

    pairs: int
    source: SideStatistics
    target: SideStatistics
    word_for_word: bool = False  # every target of the sample has as many words as its source

    @property
    def has_tags(self) -> bool:
        """Whether the targets look like tags: one word of a small set for each word of a larger one."""
        small = self.target.closed_vocabulary and self.target.vocabulary <= self.source.vocabulary / WORDS_A_TAG
        return self.word_for_word and small

    @property
    def shared(self) -> bool:
        """Whether both sides use largely the same characters."""
        both = self.source.alphabet & self.target.alphabet
        return len(both) >= 0.6 * max(len(self.source.alphabet), len(self.target.alphabet), 1)

    @property
    def has_labels(self) -> bool:
        """Whether the targets look like labels: few short lines, each of which occurs often."""
        few = 2 <= self.target.distinct <= min(MAX_LABELS, min(self.pairs, SAMPLE) / LABEL_COUNT)
        return few and self.target.words <= 3


def corpus_statistics(corpora: Corpora, invalid: Invalid) -> CorpusStatistics:
    counts = DropCounter()
    sides = (_sides(corpus, example) for corpus in corpora for example in read_corpus(corpus, invalid, counts))
    pairs = (pair for pair in sides if pair[0].strip() and pair[1].strip())
    sample = list(islice(pairs, SAMPLE))
    more = sum(1 for _ in pairs)
    if not sample:
        for corpus in corpora if counts else ():  # lines were dropped: the first of them says why
            deque(read_corpus(corpus, "error"), maxlen=0)
        files = ", ".join(str(corpus.path or corpus.source) for corpus in corpora)
        raise InputError("no pairs: one side is always empty", where=files, remedy="give lines with two sides")
    return CorpusStatistics(
        len(sample) + more,
        SideStatistics.of([s for s, _ in sample]),
        SideStatistics.of([t for _, t in sample]),
        all(len(s.split()) == len(t.split()) for s, t in sample),
    )


def _sides(corpus: Corpus, example: Example) -> tuple[str, str]:
    """The columns of the source as one text, and the target; for text without a source, the text twice."""
    target = example.target or ""
    tagged = corpus.language or corpus.language_column
    source = split_language(example.source)[1] if tagged else example.source
    return (source.replace("\t", " ") if corpus.format == "pairs" else target), target


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: str
    line: int
    text: str = ""  # its beginning


@dataclass
class Problem:
    """Lines with one kind of problem: their number, and the first of them."""

    count: int = 0
    places: list[Place] = field(default_factory=list)
    unreadable: bool = False  # training stops at such a line, unless `data.invalid` says drop

    def add(self, place: Place) -> None:
        self.count += 1
        if len(self.places) < SHOWN:
            self.places.append(place)


@dataclass(frozen=True)
class Side:
    """Lengths in characters and scripts of one side of the pairs."""

    median: float
    longest: int
    histogram: list[int]  # lines in bins of equal width, from 0 to `limit`; longer lines are in the last bin
    limit: float
    scripts: dict[str, float]  # share of the letters, of the first lines

    @classmethod
    def of(cls, lengths: np.ndarray, letters: Counter[str]) -> Side:
        limit = max(float(np.quantile(lengths, 0.99)), BINS)
        counts, _ = np.histogram(np.minimum(lengths, limit), BINS, (0, limit))
        shares = {name: count / letters.total() for name, count in letters.most_common(8)}
        return cls(float(np.median(lengths)), int(lengths.max()), counts.tolist(), limit, shares)


@dataclass(frozen=True)
class SetInspection:
    """What was found in the training, development or test data."""

    examples: int
    source: Side | None  # None: there is no source, or it is a file
    target: Side
    problems: dict[str, Problem]  # by kind: empty source, copy, ...


@dataclass(frozen=True)
class Inspection:
    """What was found in a data set."""

    sets: dict[str, SetInspection]  # train, dev, test
    overlap: dict[str, Leakage]  # of dev and test with train

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(data: DataRecipe) -> Inspection:
    """Reads all corpora of a `data` section once or twice; memory grows with the development and test data only."""
    corpora = {name: getattr(data, name) for name in ("train", "dev", "test") if getattr(data, name)}
    overlap = {}
    for name in corpora:
        if name != "train":
            overlap[name] = count_leakage(_examples(data.train), _examples(corpora[name]))
    return Inspection({name: _inspect_set(them) for name, them in corpora.items()}, overlap)


def _examples(corpora: Corpora) -> Iterator[Example]:
    for corpus in corpora:
        yield from read_corpus(corpus, "drop", DropCounter())


class _Unreadable(DropCounter):
    """Stores the places of all unreadable lines as problems."""

    def __init__(self, problems: dict[str, Problem]) -> None:
        super().__init__()
        self.problems = problems

    def drop(self, reason: str, file: str, line: int) -> None:
        super().drop(reason, file, line)
        self.problems.setdefault(reason, Problem(unreadable=True)).add(Place(file, line))


def _inspect_set(corpora: Corpora) -> SetInspection:
    problems: dict[str, Problem] = {}
    lengths = (array("L"), array("L"))
    letters: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    known = PairHashSet()
    for corpus in corpora:
        for example in read_corpus(corpus, "drop", _Unreadable(problems)):
            source, target = _texts(corpus, example)
            for side, text in enumerate((source or "", target)):
                lengths[side].append(len(text))
                if len(lengths[side]) <= SAMPLE:
                    letters[side].update(filter(None, map(_script, text)))
            found = [*_problems(corpus, example, source, target)]
            if (example.source or target) and not known.add(example.source, target):
                found.append("duplicate")
            for kind in found:
                problems.setdefault(kind, Problem()).add(_place(example))
    sizes = [np.array(one, np.int64) for one in lengths]
    has_source = bool(sizes[0].any())
    if has_source:
        _add_ratios(corpora, sizes, problems)
    sides = [Side.of(size, one) for size, one in zip(sizes, letters, strict=True)]
    return SetInspection(len(sizes[0]), sides[0] if has_source else None, sides[1], problems)


def _texts(corpus: Corpus, example: Example) -> tuple[str | None, str]:
    """The text of the source without file names, and the target. None: there is no source."""
    if corpus.format != "pairs":
        return None, example.target or ""
    return " ".join(text_parts(example.source, corpus.modalities)), example.target or ""


def _problems(corpus: Corpus, example: Example, source: str | None, target: str) -> Iterator[str]:
    """The kinds of problems of one line."""
    if source is not None and not example.source.strip():
        yield "empty source" if target.strip() else "empty line"
    elif not target.strip():
        yield "empty target" if source is not None else "empty line"
    if source and source.strip() and source.strip() == target.strip():
        yield "copy of the source"
    text = f"{source or ''}{target}"
    if _BAD_ENCODING.search(text):
        yield "bad encoding"
    if not text.isprintable() and any(_is_control(character) for character in text):
        yield "control character"
    if source is not None:
        parts = zip(example.source.split("\t"), corpus.modalities, strict=False)
        if any(kind not in TEXT_KINDS and not Path(part.partition("#")[0]).exists() for part, kind in parts):
            yield "missing file"


def _is_control(character: str) -> bool:
    """Control characters, byte order marks and marks of direction; joiners are part of the spelling."""
    return unicodedata.category(character) in ("Cc", "Cf") and character not in "\t\u200c\u200d\u00ad"


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str | None:
    """The script of a letter, as the first word of its name in Unicode; None for other characters."""
    return unicodedata.name(character, "unknown").split()[0].capitalize() if character.isalpha() else None


def _place(example: Example) -> Place:
    return Place(example.file, example.line, f"{example.source}\t{example.target or ''}".strip()[:80])


def _add_ratios(corpora: Corpora, sizes: list[np.ndarray], problems: dict[str, Problem]) -> None:
    """Pairs whose ratio of lengths is far from the median. The first of them are read again for their places."""
    both = (sizes[0] > 0) & (sizes[1] > 0)
    ratios = np.log(np.maximum(sizes[1], 1) / np.maximum(sizes[0], 1))
    middle = float(np.median(ratios[both])) if both.any() else 0.0
    longer = np.maximum(*sizes)
    rows = np.flatnonzero(both & (np.abs(ratios - middle) > np.log(MAX_RATIO)) & (longer >= MIN_CHARACTERS))
    if not len(rows):
        return
    wanted, found = set(rows[:SHOWN].tolist()), Problem()
    for row, example in enumerate(_examples(corpora)):
        if row in wanted:
            found.add(_place(example))
        if len(found.places) == len(wanted):
            break
    found.count = len(rows)
    problems["length ratio"] = found
