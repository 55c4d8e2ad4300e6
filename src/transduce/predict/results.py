"""What leaves a model: the output of a line with its scores and attention, the score of a pair."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from transduce.explain.alignment import Link, links, to_words
from transduce.explain.page import Explained
from transduce.explain.reread import Path

if TYPE_CHECKING:
    from transduce.predict.model import Model


@dataclass(frozen=True)
class Prediction:
    """What the model made of one line. `score` is the sum of `token_scores` (natural logarithms)."""

    source: str
    text: str
    tokens: tuple[str, ...]  # the closing </s> included
    token_scores: tuple[float, ...]
    complete: bool = True  # False: cut at the greatest length
    source_cut: bool = False  # True: the source was longer than `max_source` tokens
    nbest: tuple[Prediction, ...] = ()  # this one and its rivals, best first
    path: Path | None = field(default=None, repr=False, compare=False)
    model: Model | None = field(default=None, repr=False, compare=False)

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @cached_property
    def explained(self) -> Explained | None:
        """The chosen path read once more, with the attention of every layer and head; None for an empty line."""
        return None if self.model is None else self.model.reread([self])[0]

    @property
    def attention(self) -> np.ndarray | None:
        """L H T S, exact; None where the decoder does not attend to the source."""
        return None if self.explained is None else self.explained.attention

    @property
    def alignment(self) -> list[Link]:
        """(source word, target word): each word of the output with the one it looked at most."""
        if self.explained is None or self.explained.attention is None:
            return []
        return links(to_words(self.explained.map()))


@dataclass(frozen=True)
class PairScore:
    """How probable a target is, given its source."""

    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.score / len(self.token_scores))
