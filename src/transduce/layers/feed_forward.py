"""Linear layer, dropout, and the position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn

from transduce.kernels.dropout import dropout
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
