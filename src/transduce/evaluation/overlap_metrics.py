"""Overlap metrics: ROUGE, CIDEr, token F1, macro F1, span F1."""

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
    """One list of references for each line; a string is a single reference."""
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


Span = tuple[str, int, int]  # type, first position, last position


def f1(correct: float, predicted: float, gold: float) -> float:
    """Harmonic mean of precision correct / predicted and recall correct / gold: 2 correct / (predicted + gold)."""
    return 2 * correct / (predicted + gold) if correct else 0.0


def overlap(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Size of the intersection of two multisets."""
    return (Counter(one) & Counter(other)).total()


def mean_score(totals: np.ndarray) -> float:
    """100 times the mean of line scores, from their sum and their number."""
    total, count = totals
    return float(100 * total / count) if count else 0.0


class SentenceMetric(TextMetric):
    """Mean over lines of a sentence score from 0 to 1 (%); with several references, of the best one."""

    perfect = 100.0

    @abstractmethod
    def sentence_score(self, hypothesis: str, reference: str) -> float: ...

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        rows = [
            [max(self.sentence_score(hypothesis, reference) for reference in line), 1.0] for hypothesis, line in pairs
        ]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        return mean_score(totals)


def rouge_words(text: str) -> list[str]:
    """Tokens of rouge_score: lower case, runs of a to z and digits; other scripts are ignored."""
    return re.findall("[a-z0-9]+", text.lower())


class Rouge1(SentenceMetric):
    """ROUGE-1: F1 of words, mean over lines (Lin 2004; as Google's rouge_score, without stemming)."""

    name = "rouge1"
    order = 1

    def sentence_score(self, hypothesis: str, reference: str) -> float:
        predicted, gold = (self._ngrams(rouge_words(text)) for text in (hypothesis, reference))
        return f1(overlap(predicted, gold), len(predicted), len(gold))

    def _ngrams(self, words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[begin : begin + self.order]) for begin in range(len(words) - self.order + 1)]

    @property
    def signature(self) -> str:
        return f"{self.name}|f1:mean|refs:best|case:lc|tok:a-z0-9|stem:no"


class Rouge2(Rouge1):
    """ROUGE-2: F1 of word bigrams, mean over lines (Lin 2004; as Google's rouge_score)."""

    name = "rouge2"
    order = 2


class RougeL(Rouge1):
    """ROUGE-L: F1 of the longest common subsequence of words, mean over lines (Lin 2004; as Google's rouge_score)."""

    name = "rougeL"

    def sentence_score(self, hypothesis: str, reference: str) -> float:
        from rapidfuzz.distance import LCSseq

        predicted, gold = rouge_words(hypothesis), rouge_words(reference)
        return f1(LCSseq.similarity(predicted, gold), len(predicted), len(gold))


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Answer normalisation of SQuAD: lower case, without (ASCII) punctuation and English articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


class TokenF1(SentenceMetric):
    """Token F1 of answers, mean over lines; ignores case, punctuation, English articles (SQuAD, Rajpurkar 2016)."""

    name = "token_f1"

    def sentence_score(self, hypothesis: str, reference: str) -> float:
        predicted, gold = answer_words(hypothesis), answer_words(reference)
        if not predicted or not gold:  # an empty answer is right if the reference is empty
            return float(predicted == gold)
        return f1(overlap(predicted, gold), len(predicted), len(gold))

    @property
    def signature(self) -> str:
        return f"{self.name}|mean|refs:best|case:lc|punctuation:no|articles:no"


class MacroF1(TextMetric):
    """Macro F1: unweighted mean of the F1 of each label in the references, one label a line (%).

    The columns of its statistics are (correct, predicted, gold) of each label, in the order of the labels' names. A
    label without gold lines is not part of the mean, so a resample of lines is scored like a corpus of its own.
    """

    name = "macro_f1"
    perfect = 100.0

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = [(label.strip(), [one.strip() for one in line]) for label, line in pair_up(hypotheses, references)]
        column = {label: number for number, label in enumerate(sorted({one for _, line in pairs for one in line}))}
        rows = np.zeros((len(pairs), len(column), 3))
        for row, (predicted, line) in zip(rows, pairs, strict=True):
            gold = predicted if predicted in line else line[0]
            row[column[gold], 2] = 1
            if predicted in column:
                row[column[predicted], 1] = 1
            row[column[gold], 0] = predicted == gold
        return rows.reshape(len(pairs), -1)

    def value(self, totals: np.ndarray) -> float:
        scores = [f1(*label) for label in totals.reshape(-1, 3) if label[2]]
        return float(100 * np.mean(scores)) if scores else 0.0


# B begins a span, I continues it, E and L end it, S and U are single: IOB, IOB2, BIOES and BILOU in one.
_OUTSIDE, _CONTINUES, _CONTINUABLE = ("O", ""), frozenset("IEL"), frozenset("BI")


def _split_tag(label: str) -> tuple[str, str]:
    mark, _, kind = label.partition("-")
    return (mark, kind) if mark in ("B", "I", "E", "L", "S", "U") else _OUTSIDE


def spans(labels: Sequence[str]) -> list[Span]:
    """The spans of a tag sequence, with the leniency of conlleval: an I after O begins a span, like a B."""
    result: list[Span] = []
    previous = _OUTSIDE
    for position, (mark, kind) in enumerate(map(_split_tag, labels)):
        if mark != "O":
            if mark in _CONTINUES and previous[0] in _CONTINUABLE and previous[1] == kind:
                result[-1] = (kind, result[-1][1], position)
            else:
                result.append((kind, position, position))
        previous = (mark, kind)
    return result


def is_bio(labels: Sequence[str]) -> bool:
    """Whether labels look like BIO tags: all are O or a prefix with a type, and some are not O."""
    typed = [label for label in labels if label != "O"]
    return bool(typed) and all(kind and mark != "O" for mark, kind in map(_split_tag, typed))


class SpanF1(TextMetric):
    """Span F1: micro F1 of typed spans from BIO or BIOES tags, over all lines (as conlleval; %)."""

    name = "span_f1"
    perfect = 100.0

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        rows = []
        for hypothesis, line in pair_up(hypotheses, references):
            predicted = set(spans(hypothesis.split()))
            golds = [set(spans(reference.split())) for reference in line]
            # The reference with the fewest errors; of equal ones the one with the most spans.
            gold = min(golds, key=lambda gold: (len(predicted ^ gold), -len(gold)))
            rows.append([len(predicted & gold), len(predicted), len(gold)])
        return np.array(rows, dtype=float).reshape(-1, 3)

    def value(self, totals: np.ndarray) -> float:
        correct, predicted, gold = totals
        return 100 * f1(correct, predicted, gold) if predicted + gold else 100.0


ORDERS = (1, 2, 3, 4)
LENGTH_SIGMA = 6.0  # sigma of the length penalty, in words
NgramVector = dict[tuple[str, ...], float]


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and apostrophes, without punctuation."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


def _ngram_counts(text: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[begin : begin + order]) for begin in range(len(text) - order + 1))


class Cider(TextMetric):
    """CIDEr-D: TF-IDF weighted n-gram similarity, n up to 4 (Vedantam 2015); 100 times its mean over lines.

    For each order, g_k is the count of n-gram k times log(lines / lines whose references contain k). The line score is

        10 mean over orders and references of e^(-(l_c - l_r)^2 / (2 6^2)) sum_k min(c_k, r_k) r_k / (|c| |r|)

    with c and r the vectors g of hypothesis and reference, l their lengths. Document frequencies come from the
    references of the whole set, so scores of different sets are not comparable, and a single line has no score.
    """

    name = "cider"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = [(words(text), [words(line) for line in lines]) for text, lines in pair_up(hypotheses, references)]
        ngrams = [{gram for line in lines for n in ORDERS for gram in _ngram_counts(line, n)} for _, lines in pairs]
        frequencies = Counter(gram for grams in ngrams for gram in grams)
        rows = [[self._line_score(text, lines, frequencies, len(pairs)), 1.0] for text, lines in pairs]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def _line_score(
        self, hypothesis: list[str], references: list[list[str]], frequencies: Counter[tuple[str, ...]], lines: int
    ) -> float:
        def vector(text: list[str], order: int) -> NgramVector:
            counts = _ngram_counts(text, order)
            return {gram: count * math.log(lines / max(1, frequencies[gram])) for gram, count in counts.items()}

        total = 0.0
        for order in ORDERS:
            tf_idf = vector(hypothesis, order)
            for reference in references:
                penalty = math.exp(-((len(hypothesis) - len(reference)) ** 2) / (2 * LENGTH_SIGMA**2))
                total += penalty * _clipped_cosine(tf_idf, vector(reference, order))
        return 10 * total / (len(ORDERS) * len(references))

    def value(self, totals: np.ndarray) -> float:
        total, count = totals
        return float(100 * total / count) if count else 0.0

    @property
    def signature(self) -> str:
        return f"{self.name}-d|n:4|sigma:6|case:lc|tok:letters|punctuation:no|stem:no|df:references of the set|x100"


def _clipped_cosine(hypothesis: NgramVector, reference: NgramVector) -> float:
    """Cosine with the weights of the hypothesis clipped to those of the reference."""
    product = sum(min(w, reference[gram]) * reference[gram] for gram, w in hypothesis.items() if gram in reference)
    norms = math.sqrt(sum(w * w for w in hypothesis.values())) * math.sqrt(sum(w * w for w in reference.values()))
    return product / norms if norms else 0.0
