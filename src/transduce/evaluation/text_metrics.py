"""Text metrics: exact match, accuracy, BLEU, spBLEU, chrF, TER, word, character and phone error rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transduce.contracts import TextMetric
from transduce.errors import InputError
from transduce.evaluation.learned_metrics import require_library
from transduce.evaluation.overlap_metrics import References, pair_up, words


class ExactMatch(TextMetric):
    """Exact match: lines that equal a reference, character for character (%)."""

    name = "exact"
    perfect = 100.0

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        return np.array([[hypothesis in line, 1.0] for hypothesis, line in pairs]).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        hits, count = totals
        return float(100 * hits / count) if count else 0.0


class SequenceErrorRate(ExactMatch):
    """Sequence error rate: lines that equal no reference (%). The word error rate of pronunciation and inflection."""

    name = "ser"
    higher_is_better = False
    perfect = 0.0

    def value(self, totals: np.ndarray) -> float:
        return 100.0 - super().value(totals) if totals[1] else 0.0


class Accuracy(TextMetric):
    """Accuracy: correct labels, position by position (%); with one label a line, correct lines."""

    name = "accuracy"
    perfect = 100.0

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        rows = []
        for hypothesis, line in pair_up(hypotheses, references):
            labels = hypothesis.split()
            right = [sum(a == b for a, b in zip(labels, reference.split(), strict=False)) for reference in line]
            best = max(range(len(line)), key=right.__getitem__)
            rows.append([right[best], len(line[best].split())])
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        right, count = totals
        return float(100 * right / count) if count else 0.0


class SacrebleuMetric(TextMetric):
    """Base of the metrics of sacrebleu: its tokenisation, statistics and signature."""

    width: int  # number of statistics of one line
    perfect = 100.0

    def make(self) -> Any:
        """The metric object of sacrebleu."""
        raise NotImplementedError

    @cached_property
    def _scorer(self) -> Any:
        scorer = self.make()
        scorer.num_refs = 1  # sacrebleu sets it when it counts; the signature may be read before
        return scorer

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        if not pairs:
            return np.zeros((0, self.width))
        max_references = max(len(line) for _, line in pairs)
        # sacrebleu takes one stream for each reference; None stands for a missing one.
        streams = [[line[i] if i < len(line) else None for _, line in pairs] for i in range(max_references)]
        # A private name of sacrebleu. Its own significance tests use it, and our tests compare the result with the
        # public corpus_score, so a change is noticed.
        return np.asarray(self._scorer._extract_corpus_statistics([h for h, _ in pairs], streams), dtype=float)

    @property
    def signature(self) -> str:
        """The signature of sacrebleu, with the number of references of the last statistics (1 before any)."""
        return str(self._scorer.get_signature())


class Bleu(SacrebleuMetric):
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
        """With the n-gram order, which the signature of sacrebleu lacks."""
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


class TokenisedBleu(Bleu):
    """BLEU of text that is tokenised already: subwords marked with `@@ ` are joined, nothing else is split."""

    name = "bleu_tokenised"

    def make(self) -> Any:
        from sacrebleu.metrics import BLEU

        return BLEU(force=True, tokenize="none", max_ngram_order=self.order)

    def clean(self, text: str) -> str:
        return text.replace("@@ ", "").removesuffix("@@")

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        lines = [[self.clean(reference) for reference in line] for _, line in pairs]
        return super().statistics([self.clean(hypothesis) for hypothesis, _ in pairs], lines)


class SentencePieceBleu(Bleu):
    """spBLEU: BLEU of SentencePiece tokens, for languages with and without spaces (Goyal 2022; sacrebleu).

    The SentencePiece model is `model`, else the file in the cache of sacrebleu; it is never downloaded here.
    """

    name = "spbleu"

    def __init__(self, *, tokenizer: Literal["flores101", "flores200"] = "flores200", model: str | None = None) -> None:
        self.tokenizer, self.model = tokenizer, model

    @property
    def model_file(self) -> Path:
        from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
        from sacrebleu.utils import SACREBLEU_DIR

        address = SPM_MODELS[self.tokenizer]["url"]
        file = Path(self.model or Path(SACREBLEU_DIR, "models", address.rpartition("/")[2]))
        if not file.is_file():
            remedy = f"fetch {address} and write {{kind: spbleu, tokenizer: {self.tokenizer}, model: FILE}}"
            raise InputError("no SentencePiece model", where=str(file), remedy=remedy)
        return file

    def check(self) -> None:
        require_library("sentencepiece", self.name)
        _ = self.model_file

    def make(self) -> Any:
        from sacrebleu.metrics import BLEU
        from sacrebleu.tokenizers.tokenizer_spm import TokenizerSPM

        processor = require_library("sentencepiece", self.name).SentencePieceProcessor()
        try:
            processor.Load(str(self.model_file))
        except (OSError, RuntimeError) as error:
            raise InputError(f"no SentencePiece model: {error}", where=str(self.model_file)) from None
        scorer = BLEU(force=True, tokenize="none", max_ngram_order=self.order)
        # The constructor of sacrebleu's tokenizer downloads the model if its cache lacks it.
        scorer.tokenizer = TokenizerSPM.__new__(TokenizerSPM)
        scorer.tokenizer.name, scorer.tokenizer.sp = self.tokenizer, processor
        scorer.tokenizer_signature = self.tokenizer
        return scorer

    @property
    def signature(self) -> str:
        """With the hash of the SentencePiece model."""
        return f"{super().signature}|spm:{sha256(self.model_file.read_bytes()).hexdigest()[:8]}"


class CaptionBleu4(TokenisedBleu):
    """BLEU of captions, as the papers report it: lower-cased words without punctuation, not smoothed (sacrebleu)."""

    name = "caption_bleu4"

    def clean(self, text: str) -> str:
        return " ".join(words(text))

    def value(self, totals: np.ndarray) -> float:
        hypothesis, reference, *counts = totals
        correct, total = counts[: self.order], counts[self.order :]
        if not all(correct):
            return 0.0
        precision = sum(math.log(a / b) for a, b in zip(correct, total, strict=True)) / self.order
        return float(100 * math.exp(min(0.0, 1 - reference / hypothesis) + precision))

    @property
    def signature(self) -> str:
        return f"{self.name}|n:{self.order}|refs:closest length|case:lc|tok:letters|punctuation:no|smooth:none"


class CaptionBleu1(CaptionBleu4):
    """BLEU-1 of captions: see `caption_bleu4`."""

    name, order, width = "caption_bleu1", 1, 4


class CaptionBleu2(CaptionBleu4):
    """BLEU-2 of captions: see `caption_bleu4`."""

    name, order, width = "caption_bleu2", 2, 6


class CaptionBleu3(CaptionBleu4):
    """BLEU-3 of captions: see `caption_bleu4`."""

    name, order, width = "caption_bleu3", 3, 8


class ChrF(SacrebleuMetric):
    """chrF2: F-score of character n-grams up to 6, recall weighted double (Popović 2015; sacrebleu)."""

    name = "chrf"
    width = 18  # for each order: hypothesis n-grams, reference n-grams, matches

    def make(self) -> Any:
        from sacrebleu.metrics import CHRF

        return CHRF()

    def value(self, totals: np.ndarray) -> float:
        hypothesis, reference, matches = totals.reshape(-1, 3).T
        present = (hypothesis > 0) & (reference > 0)  # orders longer than every line do not count
        if not present.any():
            return 0.0
        precision = float((matches[present] / hypothesis[present]).mean())
        recall = float((matches[present] / reference[present]).mean())
        # F = (1 + b^2) P R / (b^2 P + R) with b = 2
        return 100 * 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


class ChrFPlusPlus(ChrF):
    """chrF++: chrF2 with n-grams of one and two words (Popović 2017; sacrebleu)."""

    name = "chrf++"
    width = 24

    def make(self) -> Any:
        from sacrebleu.metrics import CHRF

        return CHRF(word_order=2)


def _error_rate(totals: np.ndarray) -> float:
    """Edits over reference length (%); with empty references, any edit makes 100."""
    edits, length = totals
    return float(100 * edits / length) if length else (100.0 if edits else 0.0)


class Ter(SacrebleuMetric):
    """Translation edit rate: edits and shifts of blocks, over the mean reference length (Snover 2006; sacrebleu)."""

    name = "ter"
    higher_is_better = False
    perfect = 0.0
    width = 2

    def make(self) -> Any:
        from sacrebleu.metrics import TER

        return TER()

    def value(self, totals: np.ndarray) -> float:
        return _error_rate(totals)


class WordErrorRate(TextMetric):
    """Word error rate: substitutions, deletions and insertions over the words of the closest reference (%)."""

    name = "wer"
    higher_is_better = False
    perfect = 0.0

    def units(self, text: str) -> Sequence[str]:
        return text.split()

    def statistics(self, hypotheses: Sequence[str], references: References) -> np.ndarray:
        pairs = pair_up(hypotheses, references)
        return np.array([self._closest(*pair) for pair in pairs], dtype=float).reshape(-1, 2)

    def _closest(self, hypothesis: str, references: list[str]) -> tuple[int, int]:
        from rapidfuzz.distance import Levenshtein

        hypothesis_units = self.units(hypothesis)
        counts = [(Levenshtein.distance(units, hypothesis_units), len(units)) for units in map(self.units, references)]
        # Fewest edits; of equal ones the longest reference, which gives the lowest rate.
        return min(counts, key=lambda count: (count[0], -count[1]))

    def value(self, totals: np.ndarray) -> float:
        return _error_rate(totals)


class CharacterErrorRate(WordErrorRate):
    """Character error rate: edits over the characters of the closest reference, spaces included (%)."""

    name = "cer"

    def units(self, text: str) -> Sequence[str]:
        return text.strip()


class PhoneErrorRate(WordErrorRate):
    """Phone error rate: the word error rate of phones separated by spaces (%)."""

    name = "per"
