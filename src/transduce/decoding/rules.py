"""Scores of the next tokens and the tokens so far in, changed scores out: what may not be said, or less readily."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Rule
from transduce.flow import EOS, PAD


class MinLength(Rule):
    """no </s> before this many tokens"""

    def __init__(self, length: int) -> None:
        self.length = length

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        short = (history != PAD).sum(1) < self.length  # R
        scores[:, EOS] = scores[:, EOS].masked_fill(short, -torch.inf)
        return scores


class NoRepeat(Rule):
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


class RepetitionPenalty(Rule):
    """tokens already said have their log-probability multiplied (Keskar 2019)"""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        said = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, history, True)
        said[:, : EOS + 1] = False  # <pad>, <s> and </s>
        return torch.where(said, scores * self.penalty, scores)


class Ban(Rule):
    """these tokens are never said"""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._on: dict[torch.device, Tensor] = {}  # the same there: a recorded step cannot fetch them from the host

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        if scores.device not in self._on:
            self._on[scores.device] = torch.tensor(self.tokens, device=scores.device)
        return scores.index_fill_(1, self._on[scores.device], -torch.inf)
