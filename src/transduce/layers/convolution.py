"""Convolutions over sequences: gated stacks with dilation (Gehring 2017), positional convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, Rate
from transduce.errors import InputError
from transduce.layers.feed_forward import Dropout, dense

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two terms
MAX_RECEPTIVE_FIELD = 2**20  # rows


class GatedConvolution(nn.Module):
    """a * sigmoid(b) with [a; b] = W [x_{t-(k-1)d} .. x_{t-d}, x_t] + c, over k rows (Gehring 2017, Dauphin 2017)

    The rows are d apart: the dilation (van den Oord 2016, Kalchbrenner 2016).
    """

    def __init__(
        self, width: int, kernel: int, dropout: float, dilation: int = 1, *, input_width: int | None = None
    ) -> None:
        super().__init__()
        self.width, self.input_width = width, input_width or width
        self.before = (kernel - 1) * dilation  # rows before the first output
        self.dropout = Dropout(dropout)
        self.conv = nn.Conv1d(self.input_width, 2 * width, kernel, dilation=dilation)
        self.residual_proj = None if self.input_width == width else dense(self.input_width, width)
        # The initialisation compensates for the gate, which halves the variance, and for dropout.
        nn.init.normal_(self.conv.weight, std=math.sqrt(4 * (1 - dropout) / (kernel * self.input_width)))
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """R (T + before) D -> R T D."""
        both = self.conv(self.dropout(rows).transpose(1, 2)).transpose(1, 2)
        return F.glu(both, -1)

    def residual(self, rows: Tensor) -> Tensor:
        """What a residual connection adds to the output: the input, projected where the widths differ."""
        return rows if self.residual_proj is None else self.residual_proj(rows)


@dataclass(frozen=True)
class ConvolutionOptions:
    """The options of a stack of gated convolutions."""

    layers: Count = 4
    width: Count = 256
    kernel: Count = 3
    widths: tuple[Count, ...] = ()  # of each layer, where they differ
    kernels: tuple[Count, ...] = ()
    dilation: Count = 1  # growth of the distance between the rows of a convolution from layer to layer: see `dilations`
    embedding_width: Count | None = None  # where it differs, linear layers lead to the convolutions and back
    dropout: Rate = 0.1

    @property
    def first_width(self) -> int:
        return (*self.widths, self.width)[0]

    @property
    def outer_width(self) -> int:
        """The width of the embeddings."""
        return self.embedding_width or self.width

    def make(self) -> Iterator[GatedConvolution]:
        widths, kernels = self.widths or (self.width,) * self.layers, self.kernels or (self.kernel,) * self.layers
        if len(widths) != self.layers or len(kernels) != self.layers or widths[-1] != self.width:
            problem = f"{len(widths)} widths and {len(kernels)} kernels for {self.layers} layers"
            remedy = "give one width and one kernel for each layer, and the last width as `width`"
            raise InputError(f"{problem} of the last width {self.width}", remedy=remedy)
        inputs, distances = (widths[0], *widths), dilations(self.layers, max(kernels), self.dilation)
        return (
            GatedConvolution(out, rows, self.dropout, distance, input_width=given)
            for given, out, rows, distance in zip(inputs[:-1], widths, kernels, distances, strict=True)
        )

    def make_embedding_proj(self) -> nn.Module | None:
        """The linear layer from the embeddings to the first convolution, where there is one."""
        plain = self.embedding_width is None and self.first_width == self.outer_width
        return None if plain else dense(self.outer_width, self.first_width)


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
            f"{layers} layers with these dilations have a receptive field of {rows:,} rows",
            remedy="reduce layers, kernel or dilation",
        )
    return found
