"""Scores of the next tokens and the tokens so far in, changed scores out: what may not be said, or less readily."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from transduce.contracts import LogitsProcessor
from transduce.flow import EOS, PAD


class MinLength(LogitsProcessor):
    """no </s> before this many tokens"""

    def __init__(self, length: int) -> None:
        self.length = length

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        short = (history != PAD).sum(1) < self.length  # R
        scores[:, EOS] = scores[:, EOS].masked_fill(short, -torch.inf)
        return scores

    def forbids(self, said: int) -> Sequence[int]:
        return (EOS,) if said < self.length else ()


class NoRepeat(LogitsProcessor):
    """no run of n tokens twice"""

    def __init__(self, size: int) -> None:
        self.size = size

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        size = self.size
        if history.size(1) < size:
            return scores
        runs = history.unfold(1, size, 1)  # R runs n
        begun = history[:, history.size(1) - size + 1 :]  # R n-1: what the next token would complete
        again = (runs[..., :-1] == begun[:, None]).all(-1) & (runs != PAD).all(-1)  # R runs
        banned = torch.zeros_like(scores).scatter_add_(1, runs[..., -1], again.to(scores.dtype)) > 0
        return scores.masked_fill(banned, -torch.inf)


class RepetitionPenalty(LogitsProcessor):
    """tokens already said have their log-probability multiplied (Keskar 2019)"""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        said = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, history, True)
        said[:, : EOS + 1] = False  # <pad>, <s> and </s>
        return torch.where(said, scores * self.penalty, scores)


class First(LogitsProcessor):
    """every output begins with this token, which costs nothing"""

    def __init__(self, token: int) -> None:
        self.token = token

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        return _only(scores, self.token, (history == PAD).all(1))

    def forbids(self, said: int) -> Sequence[int] | None:
        return () if said else None


class Closed(LogitsProcessor):
    """the last token that fits is </s>, which then costs nothing"""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        return _only(scores, EOS, (history != PAD).sum(1) == self.longest - 1)

    def forbids(self, said: int) -> Sequence[int] | None:
        return None if said == self.longest - 1 else ()


def _only(scores: Tensor, token: int, where: Tensor) -> Tensor:
    """In these rows (R) nothing but this token may be said."""
    forced = torch.full_like(scores, -torch.inf)
    forced[:, token] = 0.0
    return torch.where(where[:, None], forced, scores)


class Ban(LogitsProcessor):
    """these tokens are never said"""

    def __init__(self, tokens: list[int], *, after: int | None = None) -> None:
        self.tokens, self.after = tokens, after  # after: only where so many stand before; None: everywhere
        self._on: dict[torch.device, Tensor] = {}  # the same there: a recorded step cannot fetch them from the host

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        if scores.device not in self._on:
            self._on[scores.device] = torch.tensor(self.tokens, device=scores.device)
        tokens = self._on[scores.device]
        if self.after is None:
            return scores.index_fill_(1, tokens, -torch.inf)
        there = (history != PAD).sum(1, keepdim=True) == self.after  # R 1
        return torch.where(there, scores.index_fill(1, tokens, -torch.inf), scores)

    def forbids(self, said: int) -> Sequence[int]:
        return self.tokens if self.after in (None, said) else ()
