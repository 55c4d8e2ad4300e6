"""Attention scores: dot product, capped dot product, bilinear, additive, coverage, location."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn

from transduce.contracts import AttentionScore, Count
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.additive_attention import additive_context, additive_scores


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
