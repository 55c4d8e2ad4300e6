"""A vector in, a vector of another width out; and the two-layer network between attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.kernels import linear as products
from transduce.kernels.dispatch import attached
from transduce.kernels.linear import ACTIVATIONS
from transduce.kernels.split import part
from transduce.layers.dropout import Dropout

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


def dense(width_in: int, width_out: int, bias: bool = True, gain: float = 1.0) -> nn.Linear:
    """W x + b with Glorot's start (2010): activations and gradients keep their size through a deep stack."""
    layer = nn.Linear(width_in, width_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def through(layer: nn.Module, rows: Tensor, activation: Activation | None = None) -> Tensor:
    """What a layer, and then an activation, makes of rows (... I -> ... O), by the fastest way there is."""
    if products.suits((layer,), rows):
        assert isinstance(layer, nn.Linear)
        biases = [] if layer.bias is None else [layer.bias]
        return products.product(rows, [layer.weight], biases, activation or "")
    made: Tensor = layer(rows)
    return ACTIVATIONS[activation](made) if activation else made


def joins(rows: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether one product for all layers pays: in training, where weights are not laid out beforehand."""
    return torch.is_grad_enabled() and all(type(layer) is nn.Linear and not attached(layer) for layer in layers)


def side_by_side(rows: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """What each layer makes of the same rows (... D).

    Joined, the rows are read and, under autocast, turned to its precision once, and their gradient is one sum.
    """
    if not joins(rows, layers):
        return [layer(rows) for layer in layers]
    given: Sequence[Any] = layers
    weights = [layer.weight for layer in given]
    biases = [layer.bias for layer in given if layer.bias is not None]
    if products.suits(tuple(layers), rows):
        made = products.product(rows, weights, biases)
    else:
        made = F.linear(rows, torch.cat(weights), torch.cat(biases) if biases else None)
    return list(part(made, [layer.out_features for layer in given]))


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
        self.grow, self.shrink = dense(width, ff_width, bias), dense(ff_width, width, bias)
        self.gate = dense(width, ff_width, bias) if gated else None
        self.activation, self.dropout = activation, Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        grown = through(self.grow, values, self.activation)
        if self.gate is not None:
            grown = grown * through(self.gate, values)
        return through(self.shrink, self.dropout(grown))
