"""Search strategies: greedy, best path, beam search, diverse beam search, sampling, minimum Bayes risk."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from transduce.contracts import Count, Selection, Strategy
from transduce.errors import InputError
from transduce.flow import EOS
from transduce.kernels.beam_update import TOP_K

LOWEST = -1e30  # below the rank of every finished hypothesis
Stop = Literal["bound", "length", "full"]
Utility = Literal["chrf", "bleu"]
NonNegative = Annotated[float, Ge(0)]


class Greedy(Strategy):
    """the best token at every step"""

    width = 1
    candidates = 1

    def initial_totals(self, sources: int, device: torch.device) -> Tensor:
        return torch.zeros(sources, 1, device=device)

    def select(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        return self.select_top_k(totals, *TOP_K(scores, 1))

    def select_top_k(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        tokens = tokens.squeeze(-1)  # B 1
        first = torch.zeros_like(tokens)
        return Selection(first, tokens, totals + best.squeeze(-1), first)


class BestPath(Greedy):
    """the text of the most probable path of a CTC model (Graves 2006); greedy search of other models

    Greedy search of a CTC model sums over paths at every token and is mostly better; the best path takes one pass.
    """


class Beam(Strategy):
    """the N best continuations of the N best hypotheses; finished ones are ranked by total / length ** penalty

    With a coverage penalty beta, the rank also has beta * sum over the source rows i of log min(sum over the steps of
    the attention weight of i, 1) (Wu 2016): an output that leaves a source row unattended ranks lower. The attention is
    the mean of all layers and heads.
    """

    def __init__(self, *, width: Count = 5, length_penalty: float = 1.0, coverage_penalty: NonNegative = 0.0) -> None:
        self.width, self.length_penalty, self.coverage_penalty = width, length_penalty, coverage_penalty
        self.candidates: int = width

    def initial_totals(self, sources: int, device: torch.device) -> Tensor:
        totals = torch.full((sources, self.width), -torch.inf, device=device)
        totals[:, 0] = 0  # the rows are still equal: only one of them may be continued
        return totals

    def select(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        # The best of all rows are among the best of each row.
        return self.select_top_k(totals, *TOP_K(scores, min(self.candidates, scores.size(-1))))

    def select_top_k(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        best, index = (totals[..., None] + best).flatten(1).topk(self.candidates)  # B N
        return Selection(index // tokens.size(-1), tokens.flatten(1).gather(1, index), best, index)

    def rank(self, totals: Tensor, lengths: Tensor) -> Tensor:
        return totals / lengths**self.length_penalty

    def bound(self, totals: Tensor, lengths: Tensor) -> Tensor:
        # A total only falls, the penalty divides it by at most the maximal length, and a coverage penalty ends at 0.
        return totals / lengths[:, None] ** self.length_penalty


class HuggingFaceBeam(Beam):
    """beam search of transformers and fairseq: N unfinished hypotheses at every step, finished ones are extra

    The N best of all continuations may finish; the N best unfinished ones continue. A truncated hypothesis ranks like a
    complete one. `stop`: bound, when no row can still rank above the finished ones; length, when none would at its
    present length (which may miss better, longer ones); full, when N have finished.
    """

    prefer_complete = False

    def __init__(
        self,
        *,
        width: Count = 5,
        length_penalty: float = 1.0,
        coverage_penalty: NonNegative = 0.0,
        stop: Stop = "bound",
    ) -> None:
        super().__init__(width=width, length_penalty=length_penalty, coverage_penalty=coverage_penalty)
        self.stop: Stop = stop
        self.exact = stop == "bound" and length_penalty > 0
        self.candidates = 2 * width  # at most half of them end: each row has one </s>

    def select_top_k(self, totals: Tensor, best: Tensor, tokens: Tensor) -> Selection:
        chosen = super().select_top_k(totals, best, tokens)  # B 2N
        late = torch.arange(self.candidates, device=best.device) >= self.width
        return replace(chosen, totals=chosen.totals.masked_fill((chosen.tokens == EOS) & late, -torch.inf))

    def bound_lengths(self, lengths: Tensor, max_lengths: Tensor) -> Tensor:
        return max_lengths if self.stop == "bound" and self.length_penalty > 0 else lengths

    def bound(self, totals: Tensor, lengths: Tensor) -> Tensor:
        return torch.full_like(totals, LOWEST) if self.stop == "full" else super().bound(totals, lengths)


class DiverseBeam(Beam):
    """beam search in groups; a token that earlier groups selected at this step costs `diversity` (Vijayakumar 2018)

    The penalty counts in the selection only: hypotheses are ranked by their own log-probabilities.
    """

    exact = False  # a pruned row would change what later groups select

    def __init__(
        self,
        *,
        width: Count = 6,
        length_penalty: float = 1.0,
        coverage_penalty: NonNegative = 0.0,
        groups: Count = 3,
        diversity: float = 0.5,
    ) -> None:
        if width % groups:
            raise InputError(
                f"a beam of {width} cannot be divided into {groups} groups",
                where="generation.strategy",
                remedy="set `beam` to a multiple of `groups`",
            )
        super().__init__(width=width, length_penalty=length_penalty, coverage_penalty=coverage_penalty)
        self.groups, self.diversity = groups, diversity
        self.candidates = 0  # the penalty may bring up any token

    def initial_totals(self, sources: int, device: torch.device) -> Tensor:
        totals = torch.full((sources, self.width), -torch.inf, device=device)
        totals[:, :: self.width // self.groups] = 0  # one row of each group
        return totals

    def select(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        size, vocabulary = self.width // self.groups, scores.size(-1)
        penalty = torch.zeros_like(scores[:, 0])  # B V
        parts = []
        for first in range(0, self.width, size):
            plain = totals[:, first : first + size, None] + scores[:, first : first + size]  # B N/G V
            index = (plain - penalty[:, None]).flatten(1).topk(size).indices  # B N/G
            tokens, chosen = index % vocabulary, plain.flatten(1).gather(1, index)
            parts.append((index // vocabulary + first, tokens, chosen))
            penalty = penalty.scatter_add(1, tokens, self.diversity * (chosen > -torch.inf).to(penalty.dtype))
        return Selection(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


class Sample(Strategy):
    """each row samples its own token: from all, the k best, the nucleus of probability p (Holtzman 2020), or those with
    at least the share `min_p` of the probability of the best one (Nguyen 2024)"""

    random = True

    def __init__(
        self, *, width: Count = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> None:
        self.width, self.temperature, self.top_k, self.top_p, self.min_p = width, temperature, top_k, top_p, min_p

    def initial_totals(self, sources: int, device: torch.device) -> Tensor:
        return torch.zeros(sources, self.width, device=device)

    def select(self, totals: Tensor, scores: Tensor, noise: Tensor | None) -> Selection:
        assert noise is not None
        ordered, ids = (scores / self.temperature).sort(dim=-1, descending=True, stable=True)  # B N V
        probabilities = ordered.softmax(-1)
        cumulative = probabilities.cumsum(-1)
        allowed = cumulative - probabilities < self.top_p  # the best token always is
        if self.top_k:
            allowed[..., self.top_k :] = False
        if self.min_p:
            allowed &= probabilities >= self.min_p * probabilities[..., :1]
        kept = (probabilities * allowed).cumsum(-1)
        index = torch.searchsorted(kept, noise[..., None] * kept[..., -1:], right=True)
        last = (kept < kept[..., -1:]).sum(-1, keepdim=True)  # rounding must not lead past the last allowed token
        index = torch.minimum(index, last)
        tokens = ids.gather(-1, index)
        sampled = scores.gather(-1, tokens).squeeze(-1)
        parents = torch.arange(self.width, device=totals.device).expand_as(totals)
        return Selection(parents, tokens.squeeze(-1), totals + sampled)


class MinimumBayesRisk(Sample):
    """the sample of the greatest expected utility, the other samples being the references (Eikema and Aziz 2020)

    `utility`: chrf or bleu of a sentence. `aggregate`: chrF against the mean n-gram counts of all samples, which takes
    linear instead of quadratic time (Vamvas and Sennrich 2024).
    """

    def __init__(
        self,
        *,
        width: Count = 32,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        utility: Utility = "chrf",
        aggregate: bool = False,
    ) -> None:
        super().__init__(width=width, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if aggregate and utility != "chrf":
            raise InputError(
                f"no aggregate references for {utility}", where="generation.strategy", remedy="set utility: chrf"
            )
        self.utility: Utility = utility
        self.aggregate = aggregate


STRATEGIES: dict[str, type[Strategy]] = {
    "greedy": Greedy,
    "best_path": BestPath,
    "beam": Beam,
    "huggingface_beam": HuggingFaceBeam,
    "diverse_beam": DiverseBeam,
    "sample": Sample,
    "mbr": MinimumBayesRisk,
}


def length_power(strategy: Strategy) -> float | None:
    """p, where ranks and bounds are total / length ** p; None: the strategy has its own."""
    kind = type(strategy)
    if kind.bound_lengths is not Strategy.bound_lengths or not strategy.prefer_complete or not strategy.exact:
        return None
    if strategy.coverage_penalty:
        return None
    if kind.rank is Strategy.rank and kind.bound is Strategy.bound:
        return 0.0
    if isinstance(strategy, Beam) and kind.rank is Beam.rank and kind.bound is Beam.bound:
        return float(strategy.length_penalty)
    return None
