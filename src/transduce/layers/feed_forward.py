"""Linear layer, dropout, position-wise feed-forward network, mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.kernels.add_norm import dropout
from transduce.kernels.dispatch import host_may_read
from transduce.kernels.linear import linear

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
}


def dense(width_in: int, width_out: int, bias: bool = True, gain: float = 1.0) -> nn.Linear:
    """W x + b with Glorot initialisation (2010), which keeps the variance of activations and gradients."""
    layer = nn.Linear(width_in, width_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Dropout(nn.Dropout):
    """each number is 0 with probability p, else divided by 1 - p (Srivastava 2014)"""

    def forward(self, values: Tensor) -> Tensor:
        return dropout(values, self.p, self.training)


class FeedForward(nn.Module):
    """W2 f(W1 x); gated: W2 (f(W1 x) * W3 x) (Shazeer 2020)"""

    def __init__(
        self,
        width: int,
        ff_width: int,
        activation: Activation,
        dropout: float = 0.0,
        *,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.fc1, self.fc2 = dense(width, ff_width, bias), dense(ff_width, width, bias)
        self.fc_gate = dense(width, ff_width, bias) if gated else None
        self.activation, self.dropout = activation, Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        grown = linear(self.fc1, values, self.activation)
        if self.fc_gate is not None:
            grown = grown * linear(self.fc_gate, values)
        return linear(self.fc2, self.dropout(grown))


class Router(nn.Module):
    """softmax(W x + b) over the experts, in fp32 whatever the precision of matrix products (Fedus 2022)"""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.zeros(experts))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, values: Tensor) -> Tensor:
        scores = values.float() @ self.weight.float().t() + self.bias.float()  # ... E
        return scores.softmax(-1)


class MixtureOfExperts(nn.Module):
    """sum of p_e FFN_e(x) over the experts e of the k largest p = softmax(W x + b) (Shazeer 2017)

    With k = 1 the weight is p_e (Switch Transformer, Fedus 2022); with more, the k weights are divided by their sum
    (GShard, Lepikhin 2021). No expert has a capacity: a row is computed from itself alone and none is dropped, so that
    results do not depend on padding or on the batch. No loss balances the load of the experts.
    """

    def __init__(self, width: int, experts: list[FeedForward], per_token: int) -> None:
        super().__init__()
        if per_token > len(experts):
            raise InputError(
                f"{per_token} experts for each token, and there are {len(experts)}",
                remedy="set experts_per_token to at most experts",
            )
        self.per_token, self.experts = per_token, nn.ModuleList(experts)
        self.router = Router(width, len(experts))

    def forward(self, values: Tensor) -> Tensor:
        rows = values.flatten(0, -2)  # N D
        gates, chosen = self.router(rows).topk(self.per_token, -1)  # N k
        gates = gates if self.per_token == 1 else gates / gates.sum(-1, keepdim=True)
        weights = torch.zeros(rows.size(0), len(self.experts), device=rows.device).scatter(1, chosen, gates)  # N E
        compute = self._chosen if host_may_read(rows) else self._all
        return compute(rows, weights).view_as(values)

    def _chosen(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Each expert computes the rows that chose it; in training also none, so that every weight has a gradient."""
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            picked = weights[:, number].nonzero().squeeze(1)
            if len(picked) or torch.is_grad_enabled():
                output = expert(rows[picked]) * weights[picked, number, None]
                total = total.index_add(0, picked, output.to(total.dtype))
        return total

    def _all(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Every expert computes every row: the same shapes whatever the choice, as a captured graph needs them."""
        parts = (expert(rows) * weights[:, number, None] for number, expert in enumerate(self.experts))
        return torch.stack([part.to(rows.dtype) for part in parts]).sum(0)
