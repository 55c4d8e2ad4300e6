"""Scores of every next token in, the rows that go on out: greedy, beam, sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Choice, Count, Strategy


class Greedy(Strategy):
    """the best token at every step"""

    width = 1

    def begin(self, sources: int) -> Tensor:
        return torch.zeros(sources, 1)

    def choose(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Choice:
        best, tokens = scores.max(-1)  # B 1
        return Choice(torch.zeros_like(tokens), tokens, totals + best)


class Beam(Strategy):
    """the N best continuations of the N best rows; finished ones are ranked by total / length ** penalty"""

    def __init__(self, *, width: Count = 5, length_penalty: float = 1.0) -> None:
        self.width, self.length_penalty = width, length_penalty

    def begin(self, sources: int) -> Tensor:
        totals = torch.full((sources, self.width), -torch.inf)
        totals[:, 0] = 0  # the rows are still equal: only one of them may have children
        return totals

    def choose(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Choice:
        size = scores.size(-1)
        best, index = (totals[..., None] + scores).flatten(1).topk(self.width)  # B N
        return Choice(index // size, index % size, best)

    def rank(self, total: float, length: int) -> float:
        return float(total / length**self.length_penalty)

    def bound(self, totals: Tensor, longest: Tensor) -> Tensor:
        # A total only falls, and a penalty divides it by at most the greatest length.
        return totals / longest[:, None] ** self.length_penalty


class Sample(Strategy):
    """each row draws its own token, from all, from the k best, or from the likeliest that make up p"""

    random = True

    def __init__(self, *, width: Count = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        self.width, self.temperature, self.top_k, self.top_p = width, temperature, top_k, top_p

    def begin(self, sources: int) -> Tensor:
        return torch.zeros(sources, self.width)

    def choose(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Choice:
        assert noise is not None
        ordered, ids = (scores / self.temperature).sort(dim=-1, descending=True, stable=True)  # B N V
        probabilities = ordered.softmax(-1)
        reached = probabilities.cumsum(-1)
        allowed = reached - probabilities < self.top_p  # the first one always is
        if self.top_k:
            allowed[..., self.top_k :] = False
        ladder = (probabilities * allowed).cumsum(-1)
        place = torch.searchsorted(ladder, noise[..., None] * ladder[..., -1:], right=True)
        place = torch.minimum(place, (ladder < ladder[..., -1:]).sum(-1, keepdim=True))  # never past the last allowed
        tokens = ids.gather(-1, place)
        drawn = scores.gather(-1, tokens).squeeze(-1)
        parents = torch.arange(self.width, device=totals.device).expand_as(totals)
        return Choice(parents, tokens.squeeze(-1), totals + drawn)


STRATEGIES: dict[str, type[Strategy]] = {"greedy": Greedy, "beam": Beam, "sample": Sample}
