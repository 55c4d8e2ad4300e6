"""Data statistics: number of pairs, lengths, words, characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from transduce.data.languages import split_language
from transduce.data.readers.corpus import DropCounter, Invalid, read_corpus
from transduce.errors import InputError
from transduce.evaluation.overlap_metrics import is_bio
from transduce.flow import Example
from transduce.recipe import Corpora, Corpus

SAMPLE = 20_000  # pairs that are analysed; the rest is only counted

PIECES_A_WORD = 1.3  # BPE pieces, assumed
MAX_LABELS = 100  # more different targets are not taken for labels
LABEL_COUNT = 10  # mean number of lines with the same label


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
        files = ", ".join(str(corpus.path or corpus.source) for corpus in corpora)
        raise InputError("no pairs: one side is always empty", where=files, remedy="give lines with two sides")
    return CorpusStatistics(
        len(sample) + more, SideStatistics.of([s for s, _ in sample]), SideStatistics.of([t for _, t in sample])
    )


def _sides(corpus: Corpus, example: Example) -> tuple[str, str]:
    """The columns of the source as one text, and the target; for text without a source, the text twice."""
    target = example.target or ""
    tagged = corpus.language or corpus.language_column
    source = split_language(example.source)[1] if tagged else example.source
    return (source.replace("\t", " ") if corpus.format == "pairs" else target), target
