"""Log-probabilities of given texts enter; statistics for perplexity per token, word and character leave."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from transduce.contracts import Scored, ScoreMetric

_MOST = 700.0  # exp of more overflows


class Perplexity(ScoreMetric):
    """Perplexity per token: exp(- log-probability / tokens), each closing </s> one of them; depends on the tokens."""

    name = "perplexity"
    higher_is_better = False

    def units(self, one: Scored) -> int:
        return one.tokens

    def statistics(self, scored: Sequence[Scored]) -> np.ndarray:
        rows = [[one.log_probability, self.units(one)] for one in scored]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def value(self, totals: np.ndarray) -> float:
        return math.exp(min(self._nats(totals), _MOST))

    @staticmethod
    def _nats(totals: np.ndarray) -> float:
        log_probability, units = totals
        return float(-log_probability / units) if units else 0.0


class WordPerplexity(Perplexity):
    """Perplexity per word: exp(- log-probability / words), each closing </s> one of them; the same for any tokens."""

    name = "word_perplexity"

    def units(self, one: Scored) -> int:
        return one.words


class CharacterPerplexity(Perplexity):
    """Perplexity per character: exp(- log-probability / characters), each closing </s> one of them."""

    name = "character_perplexity"

    def units(self, one: Scored) -> int:
        return one.characters


class BitsPerCharacter(CharacterPerplexity):
    """Bits per character: the logarithm to base 2 of the perplexity per character."""

    name = "bits_per_character"

    def value(self, totals: np.ndarray) -> float:
        return self._nats(totals) / math.log(2)
