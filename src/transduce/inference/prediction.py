"""Results of a loaded model: the prediction of a line, with what can be derived from it, and the score of a pair."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from transduce.explain.attention import DecodedSource, Explanation, Link, links, to_words
from transduce.explain.failures import OutputWarning, attention_warnings, low_confidence, repetition, truncation
from transduce.explain.html import displayed
from transduce.inference.long_sources import AlignedPart, join_links, join_texts
from transduce.inference.protected_spans import ProtectedLine
from transduce.modalities.transcription import TimedSegment
from transduce.model import EncoderOnly

if TYPE_CHECKING:
    from transduce.inference.model import Model


@dataclass(frozen=True)
class Prediction:
    """The output for one line. `score` is the sum of `token_scores`, which are natural logarithms."""

    source: str
    text: str
    tokens: tuple[str, ...]  # </s> included
    token_scores: tuple[float, ...]
    complete: bool = True  # False: cut at the maximal length
    source_cut: bool = False  # True: the source was longer than `max_source_length` tokens, and could not be split
    segments: tuple[TimedSegment, ...] = ()  # of a recording that was transcribed in windows, with their times
    confidence: float | None = None  # 0 to 1, calibrated: see evaluation/calibration.py; None: the run has none
    nbest: tuple[Prediction, ...] = ()  # all hypotheses, best first: this one and its alternatives
    parts: tuple[Prediction, ...] = ()  # of a long source that was split, one for each part
    decoded: DecodedSource | None = field(default=None, repr=False, compare=False)
    model: Model | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """The text in a notebook, with its attention where the decoder attends."""
        if self.explanation is None or self.explanation.attention is None:
            return f"<p>{html.escape(self.text)}</p>"
        return self.explanation._repr_html_()

    def show(self) -> None:
        """Displays the text and its attention: inline in a notebook, else in the terminal."""
        if not displayed(self):
            print(self.text) if self.explanation is None else self.explanation.show()

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @cached_property
    def explanation(self) -> Explanation | None:
        """The attention of every layer and head, recomputed for this hypothesis; None for an empty line."""
        return None if self.model is None else self.model.explain_predictions([self])[0]

    @property
    def attention(self) -> np.ndarray | None:
        """Attention weights, L H T S, exact; None if the decoder does not attend to the source."""
        return None if self.explanation is None else self.explanation.attention

    @cached_property
    def alignment(self) -> list[Link]:
        """Links (source word, target word): each output word with the source word of the largest weight."""
        if self.parts:
            read = [part.source if part.decoded is None else part.decoded.text for part in self.parts]
            parts = zip(self.parts, read, strict=True)
            return join_links([AlignedPart(one.source, text, one.text, one.alignment) for one, text in parts])
        if self.explanation is None or self.explanation.attention is None:
            return []
        return links(to_words(self.explanation.map()))

    @cached_property
    def token_warnings(self) -> tuple[OutputWarning, ...]:
        """Signs of failure in tokens and scores: see explain/failures.py."""
        if self.parts:
            return tuple(one for part in self.parts for one in part.token_warnings)
        found = [*truncation(self.complete, self.source_cut, len(self.tokens)), low_confidence(self.token_scores)]
        if self.model is None or not isinstance(self.model.network, EncoderOnly):  # labels may repeat
            found.append(repetition(self.tokens[: len(self.tokens) - self.complete], self.source))
        return tuple(one for one in found if one is not None)

    @cached_property
    def warnings(self) -> tuple[OutputWarning, ...]:
        """Signs of failure in tokens, scores and attention, which is recomputed: see `explanation`."""
        if self.parts:
            return tuple(one for part in self.parts for one in part.warnings)
        attends = self.model is not None and not self.model.sourceless
        return (*self.token_warnings, *attention_warnings(self.explanation if attends else None))

    def restored(self, line: ProtectedLine) -> Prediction:
        """This prediction for a line with protected spans, which its text and its alternatives contain."""
        if line.complete(self.text) and all(line.complete(one.text) for one in self.nbest):
            return self
        text, alignment = line.restore(self.text, self.alignment)
        texts = [text, *(line.restore(one.text)[0] for one in self.nbest[1:])]
        hypotheses = zip(self.nbest, texts, strict=False)
        nbest = tuple(replace(one, source=line.source, text=own) for one, own in hypotheses)
        found = replace(self, source=line.source, text=text, nbest=nbest)
        vars(found)["alignment"] = alignment
        return found

    @classmethod
    def of_line(cls, source: str, parts: Sequence[Prediction]) -> Prediction:
        """The prediction of a line from those of its parts; its n-th hypothesis joins their n-th hypotheses."""
        if len(parts) < 2:
            return parts[0] if parts else cls(source, "", (), ())
        columns = zip(*(part.nbest or (part,) for part in parts), strict=False)
        hypotheses = [
            cls(
                source,
                join_texts([part.source for part in parts], [one.text for one in column]),
                tuple(token for one in column for token in one.tokens),
                tuple(score for one in column for score in one.token_scores),
                all(one.complete for one in column),
                any(one.source_cut for one in column),
            )
            for column in columns
        ]
        return replace(hypotheses[0], nbest=tuple(hypotheses), parts=tuple(parts))


@dataclass(frozen=True)
class PairScore:
    """The log-probability of a target given its source, token by token."""

    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    @property
    def score(self) -> float:
        return sum(self.token_scores)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.score / len(self.token_scores))
