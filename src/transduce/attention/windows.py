"""Windows of local attention: predicted and monotonic."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.contracts import Count, Window, WindowMask
from transduce.flow import Tree
from transduce.layers.feed_forward import dense


def _distances(mask: Tensor, centres: Tensor) -> Tensor:
    """The distance of each row from the centre: mask (B 1 S), centres (B T) -> B T S."""
    return mask.cumsum(-1) - 1 - centres.unsqueeze(-1)


class PredictedWindow(Window):
    """p_t = S sigmoid(v . tanh(W s_t)), rows within the radius, Gaussian of deviation radius / 2 (Luong 2015, local-p)

    The Gaussian enters before the normaliser as its logarithm, so that the weights still sum to 1: under a softmax
    they are the paper's, divided by their sum.
    """

    def __init__(self, query_width: int, *, radius: Count = 10) -> None:
        super().__init__()
        self.radius = radius
        self.q_proj = dense(query_width, query_width, bias=False)
        self.position_proj = dense(query_width, 1, bias=False)

    def forward(self, query: Tensor, mask: Tensor, past: Tree) -> WindowMask:
        lengths = mask.sum(-1)  # B 1
        centres = lengths * self.position_proj(torch.tanh(self.q_proj(query))).squeeze(-1).sigmoid()  # B T
        distances = _distances(mask, centres)
        bias = -2 * (distances / self.radius).square()  # -d^2 / (2 sigma^2)
        return WindowMask(mask & (distances.abs() <= self.radius), bias)


class MonotonicWindow(Window):
    """p_t = t, rows within the radius; the last row for larger t (Luong 2015, local-m)"""

    stateful = True

    def __init__(self, query_width: int, *, radius: Count = 10) -> None:
        super().__init__()
        self.radius = radius

    def start(self, mask: Tensor) -> Tree:
        return {"steps": mask.new_zeros(mask.size(0), 1, dtype=torch.long)}

    def update(self, past: Tree, weights: Tensor) -> Tree:
        return {"steps": past["steps"] + 1}

    def forward(self, query: Tensor, mask: Tensor, past: Tree) -> WindowMask:
        centres = torch.minimum(past["steps"].squeeze(-1), mask.sum(-1) - 1)  # B T
        return WindowMask(mask & (_distances(mask, centres).abs() <= self.radius))


WINDOWS: dict[str, type[Window]] = {"predicted": PredictedWindow, "monotonic": MonotonicWindow}
