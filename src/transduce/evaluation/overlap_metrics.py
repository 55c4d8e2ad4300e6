"""Hypotheses and references enter; what they share leaves as statistics: n-grams, words, labels, spans."""

from __future__ import annotations

import math
import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from transduce.contracts import TextMetric
from transduce.errors import InputError

References = Sequence[str] | Sequence[Sequence[str]]


def as_references(references: References) -> list[list[str]]:
    """One list of references for each line. A plain string is one reference, not a sequence of characters."""
    lines = [[line] if isinstance(line, str) else list(line) for line in references]
    for number, line in enumerate(lines, start=1):
        if not line:
            raise InputError(f"line {number} has no reference", remedy="every line needs at least one")
    return lines


def pair_up(hypotheses: Sequence[str], references: References) -> list[tuple[str, list[str]]]:
    lines = as_references(references)
    if len(hypotheses) != len(lines):
        raise InputError(
            f"{len(hypotheses)} hypotheses but {len(lines)} lines of references",
            remedy="give one line of references for each hypothesis, in the same order",
        )
    return list(zip(hypotheses, lines, strict=True))


Span = tuple[str, int, int]  # type, first place, last place


def f1(shared: float, said: float, wanted: float) -> float:
    """The harmonic mean of precision shared / said and recall shared / wanted: 2 shared / (said + wanted)."""
    return 2 * shared / (said + wanted) if shared else 0.0


def shared_count(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """How many items two bags have in common, each as often as both hold it."""
    return (Counter(one) & Counter(other)).total()


class MeanOfLines(TextMetric):
    """A score from 0 to 1 of each line, averaged over the lines (%); of several references the best one counts."""

    @abstractmethod
    def line(self, hypothesis: str, reference: str) -> float: ...

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        rows = [[max(self.line(said, reference) for reference in line), 1.0] for said, line in pairs]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        total, count = totals
        return float(100 * total / count) if count else 0.0


def rouge_words(text: str) -> list[str]:
    """Lower case, and only the letters a to z and digits: what is written in another script is not seen at all."""
    return re.findall("[a-z0-9]+", text.lower())


class Rouge1(MeanOfLines):
    """ROUGE-1: F1 of single words, mean over lines (Lin 2004; as Google's rouge_score, without stemming)."""

    name = "rouge1"
    order = 1

    def line(self, hypothesis: str, reference: str) -> float:
        said, wanted = (self._grams(rouge_words(text)) for text in (hypothesis, reference))
        return f1(shared_count(said, wanted), len(said), len(wanted))

    def _grams(self, words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[begin : begin + self.order]) for begin in range(len(words) - self.order + 1)]

    @property
    def signature(self) -> str:
        return f"{self.name}|f1:mean|refs:best|case:lc|tok:a-z0-9|stem:no"


class Rouge2(Rouge1):
    """ROUGE-2: F1 of pairs of neighbouring words, mean over lines (Lin 2004; as Google's rouge_score)."""

    name = "rouge2"
    order = 2


class RougeL(Rouge1):
    """ROUGE-L: F1 of the longest common subsequence of words, mean over lines (Lin 2004; as Google's rouge_score)."""

    name = "rougeL"

    def line(self, hypothesis: str, reference: str) -> float:
        from rapidfuzz.distance import LCSseq

        said, wanted = rouge_words(hypothesis), rouge_words(reference)
        return f1(LCSseq.similarity(said, wanted), len(said), len(wanted))


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """The words of an answer as SQuAD compares them: lower case, without punctuation (ASCII) and English articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


class TokenF1(MeanOfLines):
    """Word F1 of answers, mean over lines; case, punctuation and English articles aside (SQuAD, Rajpurkar 2016)."""

    name = "token_f1"

    def line(self, hypothesis: str, reference: str) -> float:
        said, wanted = answer_words(hypothesis), answer_words(reference)
        if not said or not wanted:  # no answer is right where there is none
            return float(said == wanted)
        return f1(shared_count(said, wanted), len(said), len(wanted))

    @property
    def signature(self) -> str:
        return f"{self.name}|mean|refs:best|case:lc|punctuation:no|articles:no"


class MacroF1(TextMetric):
    """F1 of each label, one label a line, and the plain mean over the labels that the references hold (%).

    The columns of its statistics are (right, said, wanted) of each label, in the order of the labels' names. A label
    that is never wanted has no part in the mean, so any resample of lines is scored as if it had come alone.
    """

    name = "macro_f1"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = [(said.strip(), [label.strip() for label in line]) for said, line in pair_up(hypotheses, references)]
        place = {label: number for number, label in enumerate(sorted({label for _, line in pairs for label in line}))}
        rows = np.zeros((len(pairs), len(place), 3))
        for row, (said, line) in zip(rows, pairs, strict=True):
            gold = said if said in line else line[0]
            row[place[gold], 2] = 1
            if said in place:
                row[place[said], 1] = 1
            row[place[gold], 0] = said == gold
        return rows.reshape(len(pairs), -1)

    def value(self, totals: np.ndarray) -> float:
        scores = [f1(*label) for label in totals.reshape(-1, 3) if label[2]]
        return float(100 * np.mean(scores)) if scores else 0.0


# B begins a span, I goes on, E and L end it, S and U are one alone: IOB, IOB2, BIOES and BILOU in one.
_OUTSIDE, _GOES_ON, _MAY_FOLLOW = ("O", ""), frozenset("IEL"), frozenset("BI")


def _split(label: str) -> tuple[str, str]:
    mark, _, kind = label.partition("-")
    return (mark, kind) if mark in ("B", "I", "E", "L", "S", "U") else _OUTSIDE


def spans(labels: Sequence[str]) -> list[Span]:
    """The spans that labels mark, read as generously as conlleval does: an I after O begins one, like a B."""
    found: list[Span] = []
    before = _OUTSIDE
    for place, (mark, kind) in enumerate(map(_split, labels)):
        if mark != "O":
            if mark in _GOES_ON and before[0] in _MAY_FOLLOW and before[1] == kind:
                found[-1] = (kind, found[-1][1], place)
            else:
                found.append((kind, place, place))
        before = (mark, kind)
    return found


def marks_spans(labels: Sequence[str]) -> bool:
    """Whether labels look like BIO: all of them are O or a mark with a type, and some begin or go on."""
    typed = [label for label in labels if label != "O"]
    return bool(typed) and all(kind and mark != "O" for mark, kind in map(_split, typed))


class SpanF1(TextMetric):
    """F1 of whole spans with their types, from BIO or BIOES labels, over all lines at once (as conlleval; %)."""

    name = "span_f1"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        rows = []
        for hypothesis, line in pair_up(hypotheses, references):
            said = set(spans(hypothesis.split()))
            golds = [set(spans(reference.split())) for reference in line]
            # The reference with the fewest errors; among equals the one with the most spans.
            gold = min(golds, key=lambda gold: (len(said ^ gold), -len(gold)))
            rows.append([len(said & gold), len(said), len(gold)])
        return np.array(rows, dtype=float).reshape(-1, 3)

    def value(self, totals: np.ndarray) -> float:
        right, said, wanted = totals
        return 100 * f1(right, said, wanted) if said + wanted else 100.0  # nothing to find, and nothing found


ORDERS = (1, 2, 3, 4)
SPREAD = 6.0  # sigma of the penalty for another length, in words
Vector = dict[tuple[str, ...], float]


def words(text: str) -> list[str]:
    """Lower case, in runs of letters and digits with apostrophes; punctuation is left out."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


def _counts(text: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[begin : begin + order]) for begin in range(len(text) - order + 1))


class Cider(TextMetric):
    """CIDEr-D: what most references say counts most, n-grams up to 4 (Vedantam 2015); 100 times its mean over lines.

    For each order, g_k is the count of n-gram k times log(lines / lines whose references hold k). A line's score is

        10 mean over orders and references of e^(-(l_c - l_r)^2 / (2 6^2)) sum_k min(c_k, r_k) r_k / (|c| |r|)

    with c and r the vectors g of hypothesis and reference, l their lengths. How rare an n-gram is follows from all
    lines that are scored together, so scores of different sets cannot be compared, nor does a single line have one.
    """

    name = "cider"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = [(words(said), [words(line) for line in lines]) for said, lines in pair_up(hypotheses, references)]
        held = [{gram for line in lines for n in ORDERS for gram in _counts(line, n)} for _, lines in pairs]
        lines_with = Counter(gram for grams in held for gram in grams)
        rows = [[self._line(said, lines, lines_with, len(pairs)), 1.0] for said, lines in pairs]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def _line(self, said: list[str], lines: list[list[str]], lines_with: Counter[tuple[str, ...]], total: int) -> float:
        def vector(text: list[str], order: int) -> Vector:
            counts = _counts(text, order)
            return {gram: count * math.log(total / max(1, lines_with[gram])) for gram, count in counts.items()}

        found = 0.0
        for order in ORDERS:
            own = vector(said, order)
            for line in lines:
                near = math.exp(-((len(said) - len(line)) ** 2) / (2 * SPREAD**2))
                found += near * _clipped_cosine(own, vector(line, order))
        return 10 * found / (len(ORDERS) * len(lines))

    def value(self, totals: np.ndarray) -> float:
        total, count = totals
        return float(100 * total / count) if count else 0.0

    @property
    def signature(self) -> str:
        return f"{self.name}-d|n:4|sigma:6|case:lc|tok:letters|punctuation:no|stem:no|df:references of the set|x100"


def _clipped_cosine(own: Vector, other: Vector) -> float:
    """A word said more often than the reference says it counts no more than that."""
    shared = sum(min(weight, other[gram]) * other[gram] for gram, weight in own.items() if gram in other)
    lengths = math.sqrt(sum(w * w for w in own.values())) * math.sqrt(sum(w * w for w in other.values()))
    return shared / lengths if lengths else 0.0
