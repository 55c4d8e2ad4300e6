"""Gated, dilated convolution; positional convolution."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import InputError
from transduce.layers.feed_forward import Dropout

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two terms
MAX_RECEPTIVE_FIELD = 2**20  # rows


class GatedConvolution(nn.Module):
    """a * sigmoid(b) with [a; b] = W [x_{t-(k-1)d} .. x_{t-d}, x_t] + c, over k rows (Gehring 2017, Dauphin 2017)

    The rows are d apart: the dilation (van den Oord 2016, Kalchbrenner 2016).
    """

    def __init__(self, width: int, kernel: int, dropout: float, dilation: int = 1) -> None:
        super().__init__()
        self.before = (kernel - 1) * dilation  # rows before the first output
        self.dropout = Dropout(dropout)
        self.conv = nn.Conv1d(width, 2 * width, kernel, dilation=dilation)
        # The initialisation compensates for the gate, which halves the variance, and for dropout.
        nn.init.normal_(self.conv.weight, std=math.sqrt(4 * (1 - dropout) / (kernel * width)))
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """R (T + before) D -> R T D."""
        both = self.conv(self.dropout(rows).transpose(1, 2)).transpose(1, 2)
        return F.glu(both, -1)


class PositionalConvolution(nn.Module):
    """x + f(conv x): relative positions from the rows around each row (Mohamed 2019, Baevski 2020)"""

    def __init__(self, width: int, kernel: int, groups: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        if width % groups:
            raise InputError(f"a width of {width} cannot be divided into {groups} groups", remedy="choose a divisor")
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups)

    def forward(self, rows: Tensor, real: Tensor) -> Tensor:
        """R T D -> R T D. Padding is zero, like the rows beyond the end."""
        rows = rows * real[..., None]
        context = self.conv(rows.transpose(1, 2))[..., : rows.size(1)]  # an even kernel gives one row more
        return rows + self.activation(context).transpose(1, 2)


def dilations(layers: int, kernel: int, growth: int) -> list[int]:
    """The dilation of each layer: 1, g, g^2, ... An output then depends on 1 + (k - 1) (1 + g + g^2 + ...) rows.

    With g = k every row is the root of a tree over k^L rows, each of which it reaches by exactly one path of length L.
    """
    found = [growth**number for number in range(layers)]
    if (rows := 1 + (kernel - 1) * sum(found)) > MAX_RECEPTIVE_FIELD:
        raise InputError(
            f"{layers} layers with these dilations see {rows:,} rows", remedy="reduce layers, kernel or dilation"
        )
    return found
