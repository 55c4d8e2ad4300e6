"""Perplexity per token, word and character; bits and nats per character."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from transduce.contracts import ScoredText, ScoreMetric

_MAX_EXPONENT = 700.0  # exp of a larger number overflows


class Perplexity(ScoreMetric):
    """Perplexity per token: exp(- log-probability / tokens), </s> included; depends on the tokenizer."""

    name = "perplexity"
    higher_is_better = False

    def units(self, one: ScoredText) -> int:
        return one.tokens

    def statistics(self, scored: Sequence[ScoredText]) -> np.ndarray:
        rows = [[one.log_probability, self.units(one)] for one in scored]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        return math.exp(min(self._nats(totals), _MAX_EXPONENT))

    @staticmethod
    def _nats(totals: np.ndarray) -> float:
        log_probability, units = totals
        return float(-log_probability / units) if units else 0.0


class WordPerplexity(Perplexity):
    """Perplexity per word: exp(- log-probability / words), </s> included; comparable across tokenizers."""

    name = "word_perplexity"

    def units(self, one: ScoredText) -> int:
        return one.words


class CharacterPerplexity(Perplexity):
    """Perplexity per character: exp(- log-probability / characters), </s> included."""

    name = "character_perplexity"

    def units(self, one: ScoredText) -> int:
        return one.characters


class BitsPerCharacter(CharacterPerplexity):
    """Bits per character: the logarithm to base 2 of the perplexity per character."""

    name = "bits_per_character"

    def value(self, totals: np.ndarray) -> float:
        return self._nats(totals) / math.log(2)


class NatsPerCharacter(CharacterPerplexity):
    """Nats per character: the natural logarithm of the perplexity per character, the loss of a character model."""

    name = "nats_per_character"

    def value(self, totals: np.ndarray) -> float:
        return self._nats(totals)
