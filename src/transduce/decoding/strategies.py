"""Scores of every next token in, the rows that go on out: greedy, beam, sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from transduce.contracts import Count, Selection, Strategy
from transduce.flow import EOS
from transduce.kernels.native import top_k as native

GROUP = 128
LOWEST = -1e30  # of no use against anything that has finished
Stop = Literal["bound", "length", "full"]


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of the last axis, and where: by the best of each group first, which reads the axis once."""
    found = native.top_k(scores, count)
    if found is not None:
        return found
    size = scores.size(-1)
    groups = size // GROUP
    if groups <= 4 * count:
        return scores.topk(count)
    head = scores[..., : groups * GROUP].unflatten(-1, (groups, GROUP))
    chosen = head.amax(-1).topk(count).indices  # ... M: no other group holds one of the best
    found = head.gather(-2, chosen[..., None].expand(*chosen.shape, GROUP))  # ... M GROUP
    places = chosen[..., None] * GROUP + torch.arange(GROUP, device=scores.device)
    rest = torch.arange(groups * GROUP, size, device=scores.device).expand(*scores.shape[:-1], -1)
    values = torch.cat((found.flatten(-2), scores[..., groups * GROUP :]), -1)
    best, index = values.topk(count)
    return best, torch.cat((places.flatten(-2), rest), -1).gather(-1, index)


class Greedy(Strategy):
    """the best token at every step"""

    width = 1
    wanted = 1

    def begin(self, sources: int, device: torch.device) -> Tensor:
        return torch.zeros(sources, 1, device=device)

    def choose(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        return self.pick(totals, *top(scores, 1))

    def pick(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        tokens = tokens.squeeze(-1)  # B 1
        first = torch.zeros_like(tokens)
        return Selection(first, tokens, totals + best.squeeze(-1), first)


class Beam(Strategy):
    """the N best continuations of the N best rows; finished ones are ranked by total / length ** penalty"""

    def __init__(self, *, width: Count = 5, length_penalty: float = 1.0) -> None:
        self.width, self.length_penalty = width, length_penalty
        self.wanted: int = width

    def begin(self, sources: int, device: torch.device) -> Tensor:
        totals = torch.full((sources, self.width), -torch.inf, device=device)
        totals[:, 0] = 0  # the rows are still equal: only one of them may have children
        return totals

    def choose(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        # The best of all rows are among the best of each: V is read once, by row.
        return self.pick(totals, *top(scores, min(self.wanted, scores.size(-1))))

    def pick(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        best, index = (totals[..., None] + best).flatten(1).topk(self.wanted)  # B N
        return Selection(index // tokens.size(-1), tokens.flatten(1).gather(1, index), best, index)

    def rank(self, totals: Tensor, lengths: Tensor) -> Tensor:
        return totals / lengths**self.length_penalty

    def bound(self, totals: Tensor, longest: Tensor) -> Tensor:
        # A total only falls, and a penalty divides it by at most the greatest length.
        return totals / longest[:, None] ** self.length_penalty


class HuggingFaceBeam(Beam):
    """the same with N rows that go on at every step, as transformers and fairseq search: those that end are extra

    The N best of all continuations may end; the N best that do not end go on. A path that was cut counts like a whole
    one. `stop` says when: bound, when no row can come to rank above the finished; length, when none would at the length
    it has now (which may miss better ones that are longer); full, when N have finished.
    """

    whole_first = False

    def __init__(self, *, width: Count = 5, length_penalty: float = 1.0, stop: Stop = "bound") -> None:
        super().__init__(width=width, length_penalty=length_penalty)
        self.stop: Stop = stop
        self.exact = stop == "bound" and length_penalty > 0
        self.wanted = 2 * width  # at most half of them end: each row has one </s>

    def pick(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        chosen = super().pick(totals, best, tokens)  # B 2N
        late = torch.arange(self.wanted, device=best.device) >= self.width
        return replace(chosen, totals=chosen.totals.masked_fill((chosen.tokens == EOS) & late, -torch.inf))

    def horizon(self, lengths: Tensor, longest: Tensor) -> Tensor:
        return longest if self.stop == "bound" and self.length_penalty > 0 else lengths

    def bound(self, totals: Tensor, longest: Tensor) -> Tensor:
        return torch.full_like(totals, LOWEST) if self.stop == "full" else super().bound(totals, longest)


class Sample(Strategy):
    """each row draws its own token, from all, from the k best, or from the likeliest that make up p"""

    random = True

    def __init__(self, *, width: Count = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        self.width, self.temperature, self.top_k, self.top_p = width, temperature, top_k, top_p

    def begin(self, sources: int, device: torch.device) -> Tensor:
        return torch.zeros(sources, self.width, device=device)

    def choose(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
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
        return Selection(parents, tokens.squeeze(-1), totals + drawn)


STRATEGIES: dict[str, type[Strategy]] = {
    "greedy": Greedy,
    "beam": Beam,
    "huggingface_beam": HuggingFaceBeam,
    "sample": Sample,
}
