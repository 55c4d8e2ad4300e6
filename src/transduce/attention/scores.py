"""Attention scores (dot product, bilinear, additive, coverage, location) and normalisers (softmax, entmax, hard)."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import AttentionScore, Count, Normaliser
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.attention import additive_context, additive_scores


class Dot(AttentionScore):
    """s . h (Luong 2015)"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__()
        if query_width != memory_width:
            raise InputError(
                f"a dot product needs equal widths, not {query_width} and {memory_width}",
                remedy="give encoder and decoder the same width, or use the bilinear or mlp score",
            )
        self.scale: float | None = 1.0

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.transpose(-1, -2) * (self.scale or 1.0)  # ... T S


class ScaledDot(Dot):
    """s . h / sqrt(d) (Vaswani 2017)"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__(query_width, memory_width)
        self.scale = 1 / math.sqrt(query_width)


class CappedDot(ScaledDot):
    """c tanh(s . h / (c sqrt(d))): scores stay between -c and c (Gemma Team 2024)"""

    def __init__(
        self,
        query_width: int,
        memory_width: int,
        *,
        cap: Annotated[float, Gt(0)] | None = 50.0,
        divisor: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        """`cap: null`: scores are not capped. `divisor`: a number in the place of d, the width of a head."""
        super().__init__(query_width, memory_width)
        self.cap, self.factor = cap, 1 / math.sqrt(divisor or query_width)
        self.scale = self.factor if cap is None else None

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        scores = query @ keys.transpose(-1, -2) * self.factor
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap  # ... T S


class Bilinear(AttentionScore):
    """s W h (Luong 2015, "general")"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__()
        self.scale = 1.0  # a dot product once W h has been computed
        self.k_proj = nn.Linear(memory_width, query_width, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        return self.k_proj(values)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.transpose(-1, -2)  # ... T S


class MLP(AttentionScore):
    """v . tanh(W s + U h) (Bahdanau 2015)"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(query_width, query_width, bias=False)
        self.k_proj = nn.Linear(memory_width, query_width)
        self.energy_proj = nn.Linear(query_width, 1, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        return self.k_proj(values)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return additive_scores(self.q_proj(query), keys, self.energy_proj)

    def contexts(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor | None:
        return additive_context(self.q_proj(query), keys, values, self.energy_proj, mask)

    def _meet(self, query: Tensor, keys: Tensor) -> Tensor:
        both: Tensor = self.q_proj(query).unsqueeze(-2) + keys.unsqueeze(-3)  # ... T S Q
        return both

    def _score(self, both: Tensor) -> Tensor:
        return self.energy_proj(torch.tanh(both)).squeeze(-1)  # ... T S


class Coverage(MLP):
    """v . tanh(W s + U h_j + w c_j), c_j the sum of the previous weights of h_j (Tu 2016, See 2017)"""

    stateful = True

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__(query_width, memory_width)
        self.coverage_proj = nn.Linear(1, query_width, bias=False)

    def start(self, mask: Tensor) -> Tree:
        return {"sum": self.energy_proj.weight.new_zeros(mask.shape)}  # B S

    def update(self, past: Tree, weights: Tensor) -> Tree:
        return {"sum": past["sum"] + weights}

    def stateful_forward(self, query: Tensor, keys: Tensor, past: Tree) -> Tensor:
        return self._score(self._meet(query, keys) + self.coverage_proj(past["sum"].unsqueeze(-1)))


class Location(MLP):
    """v . tanh(W s + U h_j + V f_j), f = F * a_{t-1}: a convolution of the previous weights (Chorowski 2015)"""

    stateful = True

    def __init__(self, query_width: int, memory_width: int, *, filters: Count = 16, radius: Count = 5) -> None:
        super().__init__(query_width, memory_width)
        self.location_conv = nn.Conv1d(1, filters, 2 * radius + 1, padding=radius, bias=False)
        self.location_proj = nn.Linear(filters, query_width, bias=False)

    def start(self, mask: Tensor) -> Tree:
        return {"weights": self.energy_proj.weight.new_zeros(mask.shape)}  # B S

    def update(self, past: Tree, weights: Tensor) -> Tree:
        return {"weights": weights.to(past["weights"].dtype)}

    def stateful_forward(self, query: Tensor, keys: Tensor, past: Tree) -> Tensor:
        previous: Tensor = past["weights"]  # B N S
        filtered = self.location_conv(previous.flatten(0, 1).unsqueeze(1))  # B*N C S
        features = self.location_proj(filtered.transpose(1, 2)).unflatten(0, previous.shape[:2])  # B N S Q
        return self._score(self._meet(query, keys) + features)


SCORES: dict[str, type[AttentionScore]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "capped_dot": CappedDot,
    "bilinear": Bilinear,
    "mlp": MLP,
    "coverage": Coverage,
    "location": Location,
}


def _hide(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


class Softmax(Normaliser):
    """exp(e_i) / sum_j exp(e_j)"""

    fusible = True

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return _hide(scores, mask).softmax(-1)


class Sparsemax(Normaliser):
    """the projection of the scores onto the simplex: many weights are exactly 0 (Martins & Astudillo 2016)"""

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        # The projection is max(e - tau, 0). With sorted scores, tau = (sum of the k largest - 1) / k for the
        # largest k whose k-th score is still above it. Masked scores lie below any support, but are finite.
        lowest = scores.amin(-1, keepdim=True) - 2
        scores = scores if mask is None else torch.where(mask, scores, lowest)
        ordered = scores.sort(-1, descending=True).values
        ranks = torch.arange(1, scores.size(-1) + 1, device=scores.device, dtype=scores.dtype)
        taus = (ordered.cumsum(-1) - 1) / ranks
        support = (ordered > taus).sum(-1, keepdim=True).clamp(min=1)
        weights = (scores - taus.gather(-1, support - 1)).clamp(min=0)
        return weights if mask is None else weights * mask


class Entmax(Normaliser):
    """max(e_i / 2 - tau, 0)^2, halfway between softmax and sparsemax: entmax with alpha 1.5 (Peters 2019)"""

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        exact = _hide(scores, mask).to(torch.promote_types(scores.dtype, torch.float32))
        # With the maximum shifted to 0, tau is in [-1, 0): scores below -1 have no weight, so they are clamped to -2.
        halves = ((exact - exact.amax(-1, keepdim=True).detach()) / 2).clamp(min=-2)
        tau = self._threshold(halves.detach())
        # One step of Newton on sum max(z - tau, 0)^2 = 1. At the root it changes nothing, but its gradient is the
        # implicit one, d tau / d z_i = max(z_i - tau, 0) / sum_j max(z_j - tau, 0).
        roots = (halves - tau).clamp(min=0)
        tau = tau + (roots.square().sum(-1, keepdim=True) - 1) / (2 * roots.sum(-1, keepdim=True).detach())
        return (halves - tau).clamp(min=0).square().to(scores.dtype)

    @staticmethod
    def _threshold(halves: Tensor) -> Tensor:
        """Were the k largest the support, tau would be their mean less sqrt((1 - their scatter) / k); the support is
        the largest k whose k-th is not below its own tau."""
        ordered = halves.sort(-1, descending=True).values
        ranks = torch.arange(1, halves.size(-1) + 1, device=halves.device, dtype=halves.dtype)
        means = ordered.cumsum(-1) / ranks
        scatter = ordered.square().cumsum(-1) - ranks * means.square()
        taus = means - ((1 - scatter) / ranks).clamp(min=0).sqrt()
        support = (taus <= ordered).sum(-1, keepdim=True)  # the first is always above its own
        return taus.gather(-1, support - 1)


def _straight_through(soft: Tensor) -> Tensor:
    """One-hot weights of the best row, with the gradient of the soft weights (straight-through, Bengio 2013)."""
    best = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return best + (soft - soft.detach())


class Hard(Normaliser):
    """1 for the best score, 0 elsewhere, with the gradient of the softmax (straight-through, Bengio 2013)"""

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return _straight_through(_hide(scores, mask).softmax(-1))


class Gumbel(Normaliser):
    """one row sampled from the softmax in training, the best one at inference; straight-through Gumbel (Jang 2017)"""

    def __init__(self, *, temperature: Annotated[float, Gt(0)] = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            # argmax(e_i + g_i) is a sample from softmax(e); the Gumbel noise g is -log of an exponential sample.
            scores = scores - torch.empty_like(scores).exponential_().log()
        return _straight_through((_hide(scores, mask) / self.temperature).softmax(-1))


class StochasticHard(Normaliser):
    """one row sampled from the softmax in training, the best one at inference; trained by reinforce (Xu 2015)

    The weights are 1 at the row and 0 elsewhere, times exp(log p - log p without gradient): their value is exact and
    their gradient is that of log p(row) (the DiCE operator, Foerster 2018). So a sample is returned like any other
    weights, and objectives/attention_losses.py needs nothing else.
    """

    stochastic = True

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        logs = _hide(scores, mask).log_softmax(-1)
        row = self.draw(logs) if self.training else logs.argmax(-1, keepdim=True)
        chosen = logs.gather(-1, row)
        return torch.zeros_like(logs).scatter(-1, row, (chosen - chosen.detach()).exp())

    def entropy(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        logs = _hide(scores, mask).log_softmax(-1)
        # -p log p of a masked row is 0 in the limit; its -inf must not enter a product, not even in the gradient.
        logs = logs if mask is None else logs.masked_fill(~mask, 0.0)
        probabilities = logs.exp() if mask is None else logs.exp() * mask
        return -(probabilities * logs).sum(-1)

    @staticmethod
    def draw(logs: Tensor) -> Tensor:
        """... T S -> ... T 1: argmax(log p + g) is a sample, as in Gumbel."""
        return (logs.detach() - torch.empty_like(logs).exponential_().log()).argmax(-1, keepdim=True)


class Monotonic(Normaliser):
    """stop at row j with probability sigmoid(e_j + r), never before the previous stop (Raffel 2017)

    In training the weights are the expectation over all stops, at inference the first row whose probability is above
    one half. In the paper the context is zero where attention stops nowhere; here it stops at the last row, so that
    weights sum to 1.
    """

    stateful = True

    def __init__(self, *, offset: float = -1.0, noise: Annotated[float, Ge(0)] = 1.0) -> None:
        super().__init__()
        self.offset, self.noise = nn.Parameter(torch.tensor(offset)), noise

    def start(self, mask: Tensor) -> Tree:
        return {"stops": (mask & (mask.cumsum(-1) == 1)).to(self.offset.dtype)}  # B S: at the first row

    def update(self, past: Tree, weights: Tensor) -> Tree:
        return {"stops": weights.to(past["stops"].dtype)}

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
        return self.stateful_forward(scores, visible, self.start(visible))

    def stateful_forward(self, scores: Tensor, mask: Tensor | None, past: Tree) -> Tensor:
        visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
        energies = scores + self.offset
        weights = self._expect(energies, visible, past) if self.training else self._stop(energies, visible, past)
        last = visible & (visible.cumsum(-1) == visible.sum(-1, keepdim=True))
        return weights + last * (1 - weights.sum(-1, keepdim=True)).clamp(min=0)

    def _expect(self, energies: Tensor, visible: Tensor, past: Tree) -> Tensor:
        """alpha_j = p_j sum_{k <= j} alpha'_k prod_{k <= l < j} (1 - p_l), alpha' the weights of the previous step."""
        # Noise pushes the energies away from 0, so that the expectation approximates the hard decisions of inference.
        energies = energies + self.noise * torch.randn_like(energies)
        passes = F.logsigmoid(-energies) * visible  # log (1 - p): a masked row is always skipped
        before = F.pad(passes.cumsum(-1)[..., :-1], (1, 0))
        # The cumulative products of the paper underflow; all pairs of rows cost S S, but the exponents stay below 0.
        transitions = (before[..., :, None] - before[..., None, :]).tril(0).exp().tril(0)  # ... S S: from k (last) to j
        reached: Tensor = (transitions @ past["stops"].to(transitions.dtype).unsqueeze(-1)).squeeze(-1)
        return energies.sigmoid() * visible * reached

    @staticmethod
    def _stop(energies: Tensor, visible: Tensor, past: Tree) -> Tensor:
        ahead = past["stops"].cumsum(-1) > 0.5
        stops = visible & ahead & (energies > 0)
        return (stops & (stops.cumsum(-1) == 1)).to(energies.dtype)


NORMALISERS: dict[str, type[Normaliser]] = {
    "softmax": Softmax,
    "sparsemax": Sparsemax,
    "entmax": Entmax,
    "hard": Hard,
    "gumbel": Gumbel,
    "sampled": StochasticHard,
    "monotonic": Monotonic,
}
