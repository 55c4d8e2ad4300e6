"""Data statistics: number of pairs, lengths, words, characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from transduce.data.readers.corpus import DropCounter, Invalid, read_corpus
from transduce.errors import InputError
from transduce.evaluation.overlap_metrics import is_bio
from transduce.flow import Example
from transduce.recipe import Corpora, Corpus

SAMPLE = 20_000  # pairs looked at closely; the rest is only counted


@dataclass(frozen=True)
class Side:
    """What one side of the pairs looks like."""

    characters: float  # median of a line: one line of a whole book tells nothing about the others
    words: float  # median of a line
    alphabet: frozenset[str]
    vocabulary: int  # different words in the sample
    unseen: float  # share of words still to come that are new: words met once (Good 1953)
    marks: bool = False  # its words are labels that mark spans: B-PER I-PER O

    @classmethod
    def of(cls, lines: Sequence[str]) -> Side:
        words = [line.split() for line in lines]
        counts = Counter(word for line in words for word in line)
        return cls(
            median(map(len, lines)),
            median(map(len, words)),
            frozenset("".join(lines)),
            len(counts),
            sum(count == 1 for count in counts.values()) / max(counts.total(), 1),
            is_bio(list(counts)),
        )

    @property
    def spelt(self) -> bool:
        """Single words or short strings: what matters is their letters."""
        return self.words < 2.5 or self.characters < 25

    @property
    def symbols(self) -> bool:
        """Words from a small closed set, such as phones, actions or tags."""
        return self.words >= 2 and self.vocabulary <= 200 and self.unseen < 0.01


@dataclass(frozen=True)
class Look:
    """What a corpus looks like."""

    pairs: int
    source: Side
    target: Side

    @property
    def shared(self) -> bool:
        """Both sides are written with much the same letters."""
        both = self.source.alphabet & self.target.alphabet
        return len(both) >= 0.6 * max(len(self.source.alphabet), len(self.target.alphabet), 1)


def look(corpora: Corpora, invalid: Invalid) -> Look:
    counts = DropCounter()
    sides = (_sides(corpus, example) for corpus in corpora for example in read_corpus(corpus, invalid, counts))
    pairs = (pair for pair in sides if pair[0].strip() and pair[1].strip())
    sample = list(islice(pairs, SAMPLE))
    more = sum(1 for _ in pairs)
    if not sample:
        files = ", ".join(str(corpus.path or corpus.source) for corpus in corpora)
        raise InputError("no pairs: one side is always empty", where=files, remedy="give lines with two sides")
    return Look(len(sample) + more, Side.of([s for s, _ in sample]), Side.of([t for _, t in sample]))


def _sides(corpus: Corpus, example: Example) -> tuple[str, str]:
    """The parts of a source as one text, and the target; a text without a source stands for its own."""
    target = example.target or ""
    return (example.source.replace("\t", " ") if corpus.format == "pairs" else target), target
