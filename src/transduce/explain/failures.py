"""Failure detectors of generated outputs: repetition loops, detached attention, dropped source, truncation, confidence.

The first detectors read tokens and scores, and cost nothing. Those of attention need the weights of the output, which
are recomputed once, in batches: see `Model.explain_predictions`. A detector says that an output looks like a known
failure, not that it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from transduce.explain.attention import Explanation
from transduce.modalities.source_encoding import NO_WORD

FailureKind = Literal[
    "repetition", "detached_attention", "dropped_source", "truncated_output", "truncated_source", "low_confidence"
]
LONGEST_PERIOD = 8  # tokens of a repeated part
LOOPS = 3  # times that a part of two tokens or more follows itself; a single token: `SINGLE_LOOPS`
SINGLE_LOOPS = 5
SHORTEST = 4  # tokens of source and output from which attention can be called detached
DETACHED = 0.8  # share of all attention on one row of the source
UNSEEN = 0.1  # the largest weight, of any head at any step, that counts as never attended to
DROPPED_WORDS, DROPPED_SHARE = 3, 0.3  # words in a row, and their share of the source, that are never attended to
LOW_CONFIDENCE = 0.3  # geometric mean of the probabilities of the tokens


@dataclass(frozen=True)
class OutputWarning:
    """A sign of failure. `begin` and `end` are tokens of the output, of `dropped_source` words of the source."""

    kind: FailureKind
    message: str
    value: float  # repetitions, shares or probabilities, as the message says
    begin: int | None = None
    end: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Loop:
    """A part of a sequence that follows itself."""

    begin: int
    period: int  # tokens of the part
    count: int  # times it stands there


def longest_loop(tokens: Sequence[Any]) -> Loop | None:
    """The loop that covers the most tokens; None: no part follows itself."""
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // 2) + 1):
        run = 0  # tokens in a row that are equal to those one period before
        for place in range(period, len(tokens)):
            run = run + 1 if tokens[place] == tokens[place - period] else 0
            count = run // period + 1
            if count > 1 and (best is None or count * period > best.count * best.period):
                best = Loop(place + 1 - count * period, period, count)
    return best


def repetition(tokens: Sequence[str], source: str) -> OutputWarning | None:
    """A part of the output that follows itself again and again, unless the source has such a loop too."""
    found = longest_loop(tokens)
    if found is None or found.count < (SINGLE_LOOPS if found.period == 1 else LOOPS):
        return None
    for other in (source.split(), source):
        there = longest_loop(other)
        if there is not None and there.count >= found.count:
            return None
    part = "".join(tokens[found.begin : found.begin + found.period])
    end = found.begin + found.count * found.period
    message = f"{part!r} is repeated {found.count} times in a row"
    return OutputWarning("repetition", message, found.count, found.begin, end)


def low_confidence(token_scores: Sequence[float]) -> OutputWarning | None:
    """An output whose tokens have a low probability: the geometric mean, over its tokens and </s>."""
    if not token_scores:
        return None
    mean = math.exp(sum(token_scores) / len(token_scores))
    if mean >= LOW_CONFIDENCE:
        return None
    return OutputWarning("low_confidence", f"the mean probability of its tokens is {mean:.2f}", mean)


def truncation(complete: bool, source_cut: bool, tokens: int) -> list[OutputWarning]:
    """An output that ends at the greatest length, and a source that was not read to its end."""
    found = []
    if not complete and tokens:
        found.append(OutputWarning("truncated_output", f"no end after {tokens} tokens, the limit", tokens))
    if source_cut:
        found.append(OutputWarning("truncated_source", "the source was longer than the model reads, and was cut", 1))
    return found


def detached_attention(explained: Explanation) -> OutputWarning | None:
    """Nearly all attention of all output tokens on one row of the source, such as </s>."""
    if explained.attention is None:
        return None
    weights = explained.attention.mean((0, 1))[explained.outputs]  # T S
    if min(weights.shape) < SHORTEST:
        return None
    shares = weights.mean(0)
    row = int(shares.argmax())
    if shares[row] < DETACHED:
        return None
    message = (
        f"{100 * shares[row]:.0f} % of the attention is on one row of the source: {explained.source_tokens[row]!r}"
    )
    return OutputWarning("detached_attention", message, float(shares[row]))


def dropped_source(explained: Explanation) -> OutputWarning | None:
    """Words of a source text, several in a row, that no head attends to at any step."""
    if explained.attention is None or explained.visual_sources or not explained.outputs:
        return None
    largest = explained.attention[:, :, explained.outputs].max((0, 1))  # T S
    several = len(explained.source_labels) > 1
    words = explained.source_words if several else [*range(len(explained.source_tokens))]
    weights = np.zeros(len(explained.source_labels) if several else len(explained.source_tokens))
    for word in range(len(weights)):
        columns = [column for column, one in enumerate(words) if one == word]
        if several or explained.source_words[word] != NO_WORD:
            weights[word] = largest[:, columns].sum(1).max() if columns else 1.0
        else:
            weights[word] = 1.0
    begin, end = _longest_run(weights < UNSEEN)
    if end - begin < max(DROPPED_WORDS if several else 2 * DROPPED_WORDS, DROPPED_SHARE * len(weights)):
        return None
    labels = explained.source_labels if several else explained.source_tokens
    text = (" " if several else "").join(labels[begin:end])
    share = (end - begin) / len(weights)
    return OutputWarning("dropped_source", f"no head attends to {text!r}", share, begin, end)


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """Begin and end of the longest run of True; (0, 0): there is none."""
    best, begin = (0, 0), 0
    for place, flag in enumerate([*flags.tolist(), False]):
        if not flag:
            best = max(best, (begin, place), key=lambda one: one[1] - one[0])
            begin = place + 1
    return best


def attention_warnings(explained: Explanation | None) -> list[OutputWarning]:
    """The warnings of the detectors that read attention."""
    if explained is None:
        return []
    return [one for one in (detached_attention(explained), dropped_source(explained)) if one is not None]


def explanation_warnings(explained: Explanation) -> list[OutputWarning]:
    """The warnings of an explained output. Whether something was cut, an explanation does not know."""
    found = [low_confidence(explained.token_scores)]
    if "head" not in explained.model_info:  # labels may repeat
        found.append(repetition([explained.target_tokens[one] for one in explained.outputs], explained.source))
    return [*(one for one in found if one is not None), *attention_warnings(explained)]


def count_warnings(lines: Iterable[Sequence[OutputWarning]]) -> dict[str, int]:
    """The number of lines with each kind of warning, and with any."""
    counts: dict[str, int] = {"lines": 0}
    for warnings in lines:
        counts["lines"] += bool(warnings)
        for kind in sorted({one.kind for one in warnings}):
            counts[kind] = counts.get(kind, 0) + 1
    return counts
