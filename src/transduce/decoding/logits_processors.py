"""Logits processors: changes to the log-probabilities of the next token before a strategy selects from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from transduce.contracts import Count, LogitsProcessor
from transduce.flow import BOS, EOS, PAD

NonNegative = Annotated[int, Ge(0)]


class MinLength(LogitsProcessor):
    """no </s> before this number of tokens"""

    def __init__(self, *, length: int) -> None:
        self.length = length

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        short = (history != PAD).sum(1) < self.length  # R
        scores[:, EOS] = scores[:, EOS].masked_fill(short, -torch.inf)
        return scores

    def suppressed(self, length: int) -> Sequence[int]:
        return (EOS,) if length < self.length else ()


class NoRepeatNgram(LogitsProcessor):
    """no n-gram twice"""

    def __init__(self, *, size: Count) -> None:
        self.size = size

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        size = self.size
        if history.size(1) < size:
            return scores
        ngrams = history.unfold(1, size, 1)  # R . n
        context = history[:, history.size(1) - size + 1 :]  # R n-1: the n-gram that the next token would complete
        repeated = (ngrams[..., :-1] == context[:, None]).all(-1) & (ngrams != PAD).all(-1)  # R .
        banned = torch.zeros_like(scores).scatter_add_(1, ngrams[..., -1], repeated.to(scores.dtype)) > 0
        return scores.masked_fill(banned, -torch.inf)


class RepetitionPenalty(LogitsProcessor):
    """the log-probability of tokens that were generated before is multiplied (Keskar 2019)"""

    def __init__(self, *, penalty: float) -> None:
        self.penalty = penalty

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        generated = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, history, True)
        generated[:, : EOS + 1] = False  # <pad>, <s> and </s>
        return torch.where(generated, scores * self.penalty, scores)


class ForcedBOS(LogitsProcessor):
    """every output begins with this token, at no cost"""

    def __init__(self, *, token: int) -> None:
        self.token = token

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        return _force(scores, self.token, (history == PAD).all(1))

    def suppressed(self, length: int) -> Sequence[int] | None:
        return () if length else None


class ForcedEOS(LogitsProcessor):
    """the last token of an output of maximal length is </s>, at no cost"""

    def __init__(self, *, max_length: Count) -> None:
        self.max_length = max_length

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        return _force(scores, EOS, (history != PAD).sum(1) == self.max_length - 1)

    def suppressed(self, length: int) -> Sequence[int] | None:
        return None if length == self.max_length - 1 else ()


def _force(scores: Tensor, token: int, where: Tensor) -> Tensor:
    """In these rows (R) this token has probability 1."""
    forced = torch.full_like(scores, -torch.inf)
    forced[:, token] = 0.0
    return torch.where(where[:, None], forced, scores)


class SuppressTokens(LogitsProcessor):
    """these tokens are never generated"""

    def __init__(self, *, tokens: list[int], at: int | None = None) -> None:
        self.tokens, self.at = tokens, at  # at: only after this number of tokens; None: always
        self._on: dict[torch.device, Tensor] = {}  # by device: a captured CUDA graph cannot copy them from the host

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        if scores.device not in self._on:
            self._on[scores.device] = torch.tensor(self.tokens, device=scores.device)
        tokens = self._on[scores.device]
        if self.at is None:
            return scores.index_fill_(1, tokens, -torch.inf)
        here = (history != PAD).sum(1, keepdim=True) == self.at  # R 1
        return torch.where(here, scores.index_fill(1, tokens, -torch.inf), scores)

    def suppressed(self, length: int) -> Sequence[int]:
        return self.tokens if self.at in (None, length) else ()


class TimestampRules(LogitsProcessor):
    """timestamps in pairs around every segment of a transcript, in order of time (Radford et al. 2022)

    An output begins with a timestamp. A timestamp after text ends a segment, and another timestamp or </s> follows it.
    Where all timestamps together are more probable than the best other token, one of them is next.
    """

    def __init__(
        self,
        *,
        first: NonNegative,
        text_end: NonNegative,
        none: NonNegative,
        after: NonNegative = 0,
        max_initial: NonNegative | None = None,
    ) -> None:
        """`first`: id of the timestamp 0; all later ids are timestamps. `text_end`: ids below it are text. `none`: the
        request for no timestamps. `after`: tokens of the prompt. `max_initial`: the number of the last timestamp that
        an output may begin with."""
        self.first, self.text_end, self.none, self.after, self.max_initial = first, text_end, none, after, max_initial

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        token = torch.arange(scores.size(-1), device=scores.device)
        count = (history != PAD).sum(1, keepdim=True) - self.after  # R 1: tokens after the prompt
        history = torch.nn.functional.pad(history, (2, 0), value=PAD)
        stamped = history >= self.first
        last, before = (count >= 1) & stamped[:, -1:], (count < 2) | stamped[:, -2:-1]  # R 1
        is_time = token >= self.first
        banned = (token == self.none) | (last & before & is_time)
        banned = banned | (last & ~before & (token < self.text_end) & (token != EOS))
        latest = torch.where(stamped, history, self.first - 1).amax(1, keepdim=True)
        earliest = torch.where(last & ~before, latest, latest + 1)  # the end of a segment may begin the next
        banned = banned | (is_time & (token < earliest))
        late = token > (self.first + self.max_initial if self.max_initial is not None else token)
        banned = banned | ((count == 0) & (~is_time | late))
        scores = scores.masked_fill(banned, -torch.inf)
        logs = scores.log_softmax(-1)
        total = logs.masked_fill(~is_time, -torch.inf).logsumexp(-1, keepdim=True)
        best = logs.masked_fill(is_time, -torch.inf).amax(-1, keepdim=True)
        return scores.masked_fill((total > best) & ~is_time, -torch.inf)


NEVER_GENERATED = SuppressTokens(tokens=[PAD, BOS])

LOGITS_PROCESSORS: dict[str, type[LogitsProcessor]] = {
    "min_length": MinLength,
    "no_repeat_ngram": NoRepeatNgram,
    "repetition_penalty": RepetitionPenalty,
    "forced_bos": ForcedBOS,
    "forced_eos": ForcedEOS,
    "suppress": SuppressTokens,
    "timestamps": TimestampRules,
}
