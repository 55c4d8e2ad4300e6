"""Gated convolution."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from transduce.layers.feed_forward import Dropout

HALF = math.sqrt(0.5)  # keeps the variance of a sum of two terms


class GatedConvolution(nn.Module):
    """a * sigmoid(b) with [a; b] = W [x_{t-k+1} .. x_t] + c, over k rows (Gehring 2017, Dauphin 2017)"""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.kernel, self.dropout = kernel, Dropout(dropout)
        self.conv = nn.Conv1d(width, 2 * width, kernel)
        # The initialisation compensates for the gate, which halves the variance, and for dropout.
        nn.init.normal_(self.conv.weight, std=math.sqrt(4 * (1 - dropout) / (kernel * width)))
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """R (T + k - 1) D -> R T D."""
        both = self.conv(self.dropout(rows).transpose(1, 2)).transpose(1, 2)
        return F.glu(both, -1)
