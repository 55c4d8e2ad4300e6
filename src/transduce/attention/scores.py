"""A query and keys in, one number for each key out: how well they fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from transduce.contracts import Score
from transduce.errors import InputError


class Dot(Score):
    """s . h (Luong 2015)"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__()
        if query_width != memory_width:
            raise InputError(
                f"a dot product needs equal widths, not {query_width} and {memory_width}",
                remedy="give encoder and decoder the same width, or use the bilinear or mlp score",
            )
        self.scale: float = 1.0

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.transpose(-1, -2) * self.scale  # ... T S


class ScaledDot(Dot):
    """s . h / sqrt(d) (Vaswani 2017)"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__(query_width, memory_width)
        self.scale = 1 / math.sqrt(query_width)


class Bilinear(Score):
    """s W h (Luong 2015, "general")"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__()
        self.scale = 1.0  # a dot product once W h has been computed
        self.weight = nn.Linear(memory_width, query_width, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        return self.weight(values)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.transpose(-1, -2)  # ... T S


class MLP(Score):
    """v . tanh(W s + U h) (Bahdanau 2015)"""

    def __init__(self, query_width: int, memory_width: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, query_width, bias=False)
        self.memory = nn.Linear(memory_width, query_width)
        self.vector = nn.Linear(query_width, 1, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        return self.memory(values)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        both = torch.tanh(self.query(query).unsqueeze(-2) + keys.unsqueeze(-3))  # ... T S Q
        return self.vector(both).squeeze(-1)  # ... T S


SCORES: dict[str, type[Score]] = {"dot": Dot, "scaled_dot": ScaledDot, "bilinear": Bilinear, "mlp": MLP}
