"""Hypotheses and references enter; per-line statistics that add up leave, and from their sum the published score."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from transduce.contracts import Metric, TextMetric
from transduce.errors import InputError, nearest
from transduce.evaluation.overlap_metrics import (
    Cider,
    MacroF1,
    References,
    Rouge1,
    Rouge2,
    RougeL,
    SpanF1,
    TokenF1,
    pair_up,
)
from transduce.evaluation.perplexity import BitsPerCharacter, CharacterPerplexity, Perplexity, WordPerplexity
from transduce.evaluation.retrieval_metrics import RecallAt1, RecallAt10, ReciprocalRank


class ExactMatch(TextMetric):
    """Share of lines that equal a reference, character for character (%)."""

    name = "exact"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        return np.array([[hypothesis in line, 1.0] for hypothesis, line in pairs]).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        hits, count = totals
        return float(100 * hits / count) if count else 0.0


class Accuracy(TextMetric):
    """Share of labels that are right, place by place (%); of one label a line, the share of lines."""

    name = "accuracy"

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        rows = []
        for hypothesis, line in pair_up(hypotheses, references):
            said = hypothesis.split()
            right = [sum(a == b for a, b in zip(said, reference.split(), strict=False)) for reference in line]
            best = max(range(len(line)), key=right.__getitem__)
            rows.append([right[best], len(line[best].split())])
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        right, count = totals
        return float(100 * right / count) if count else 0.0


class SacreMetric(TextMetric):
    """What sacrebleu's metrics share: its tokenisation, its statistics and its signature."""

    width: int  # numbers in the statistics of one line

    def make(self) -> Any:
        """The sacrebleu object that does the counting."""
        raise NotImplementedError

    @cached_property
    def _scorer(self) -> Any:
        scorer = self.make()
        scorer.num_refs = 1  # sacrebleu learns the number when it counts; a signature may be asked for before
        return scorer

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        if not pairs:
            return np.zeros((0, self.width))
        most = max(len(line) for _, line in pairs)
        # sacrebleu wants one stream for each reference; None is its word for "this line has fewer".
        streams = [[line[i] if i < len(line) else None for _, line in pairs] for i in range(most)]
        # The only private name used. sacrebleu's own significance tests stand on it, and ours compare with its
        # public corpus_score, so a change there cannot pass unseen.
        return np.asarray(self._scorer._extract_corpus_statistics([h for h, _ in pairs], streams), dtype=float)

    @property
    def signature(self) -> str:
        """sacrebleu's own, with the number of references of the last lines counted (1 before any were)."""
        return str(self._scorer.get_signature())


class Bleu(SacreMetric):
    """BLEU: n-gram precision up to 4 with a brevity penalty (Papineni 2002; sacrebleu, 13a tokenisation)."""

    name = "bleu"
    order = 4
    width = 10  # hypothesis length, reference length, 4 matches, 4 totals

    def make(self) -> Any:
        from sacrebleu.metrics import BLEU

        # `force` only silences the warning about text that looks tokenised
        return BLEU(force=True, max_ngram_order=self.order)

    def value(self, totals: np.ndarray) -> float:
        hypothesis, reference, *counts = (int(total) for total in totals)
        score = self._scorer.compute_bleu(
            correct=counts[: self.order],
            total=counts[self.order :],
            sys_len=hypothesis,
            ref_len=reference,
            smooth_method="exp",
            max_ngram_order=self.order,
        )
        return float(score.score)

    @property
    def signature(self) -> str:
        """With the order, of which sacrebleu says nothing."""
        return super().signature if self.order == 4 else f"{super().signature}|n:{self.order}"


class Bleu1(Bleu):
    """BLEU-1: precision of single words with a brevity penalty (Papineni 2002; sacrebleu)."""

    name, order, width = "bleu1", 1, 4


class Bleu2(Bleu):
    """BLEU-2: n-gram precision up to 2 with a brevity penalty (Papineni 2002; sacrebleu)."""

    name, order, width = "bleu2", 2, 6


class Bleu3(Bleu):
    """BLEU-3: n-gram precision up to 3 with a brevity penalty (Papineni 2002; sacrebleu)."""

    name, order, width = "bleu3", 3, 8


class ChrF(SacreMetric):
    """chrF2: F-score of character n-grams up to 6, recall counting double (Popović 2015; sacrebleu)."""

    name = "chrf"
    width = 18  # for each order: hypothesis n-grams, reference n-grams, matches

    def make(self) -> Any:
        from sacrebleu.metrics import CHRF

        return CHRF()

    def value(self, totals: np.ndarray) -> float:
        hypothesis, reference, matches = totals.reshape(-1, 3).T
        seen = (hypothesis > 0) & (reference > 0)  # orders longer than every line do not count
        if not seen.any():
            return 0.0
        precision = float((matches[seen] / hypothesis[seen]).mean())
        recall = float((matches[seen] / reference[seen]).mean())
        # F = (1 + b^2) P R / (b^2 P + R) with b = 2
        return 100 * 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


def _rate(totals: np.ndarray) -> float:
    """Edits over reference length (%); where all references are empty, any edit is a complete failure."""
    edits, length = totals
    return float(100 * edits / length) if length else (100.0 if edits else 0.0)


class Ter(SacreMetric):
    """Translation edit rate: edits and shifts of blocks, over the mean reference length (Snover 2006; sacrebleu)."""

    name = "ter"
    higher_is_better = False
    width = 2

    def make(self) -> Any:
        from sacrebleu.metrics import TER

        return TER()

    def value(self, totals: np.ndarray) -> float:
        return _rate(totals)


class WordErrorRate(TextMetric):
    """Word error rate: substitutions, deletions and insertions over the words of the closest reference (%)."""

    name = "wer"
    higher_is_better = False

    def units(self, text: str) -> Sequence[str]:
        return text.split()

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        return np.array([self._closest(*pair) for pair in pairs], dtype=float).reshape(-1, 2)

    def _closest(self, hypothesis: str, references: list[str]) -> tuple[int, int]:
        from rapidfuzz.distance import Levenshtein

        said = self.units(hypothesis)
        counts = [(Levenshtein.distance(units, said), len(units)) for units in map(self.units, references)]
        # Fewest edits; among equals the longest reference, which makes the lowest rate.
        return min(counts, key=lambda count: (count[0], -count[1]))

    def value(self, totals: np.ndarray) -> float:
        return _rate(totals)


class CharacterErrorRate(WordErrorRate):
    """Character error rate: the same over characters, spaces between words included (%)."""

    name = "cer"

    def units(self, text: str) -> Sequence[str]:
        return text.strip()


class PhoneErrorRate(WordErrorRate):
    """Phone error rate: the word error rate of phones written with spaces between them (%)."""

    name = "per"


METRICS: dict[str, type[Metric]] = {
    "exact": ExactMatch,
    "accuracy": Accuracy,
    "macro_f1": MacroF1,
    "span_f1": SpanF1,
    "token_f1": TokenF1,
    "rouge1": Rouge1,
    "rouge2": Rouge2,
    "rougeL": RougeL,
    "bleu": Bleu,
    "bleu1": Bleu1,
    "bleu2": Bleu2,
    "bleu3": Bleu3,
    "cider": Cider,
    "chrf": ChrF,
    "ter": Ter,
    "wer": WordErrorRate,
    "cer": CharacterErrorRate,
    "per": PhoneErrorRate,
    "perplexity": Perplexity,
    "word_perplexity": WordPerplexity,
    "character_perplexity": CharacterPerplexity,
    "bits_per_character": BitsPerCharacter,
    "recall@1": RecallAt1,
    "recall@10": RecallAt10,
    "mrr": ReciprocalRank,
}


def find(name: str) -> Metric:
    """The metric of this name, or an error that names the nearest one."""
    if name not in METRICS:
        raise InputError(f"unknown metric {name!r}", remedy=nearest(name, METRICS))
    return METRICS[name]()
