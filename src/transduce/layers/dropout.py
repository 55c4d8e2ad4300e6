"""Dropout."""

from __future__ import annotations

from torch import Tensor, nn

from transduce.kernels.dropout import dropout


class Dropout(nn.Dropout):
    """each number is 0 with probability p, else divided by 1 - p (Srivastava 2014)"""

    def forward(self, values: Tensor) -> Tensor:
        return dropout(values, self.p, self.training)
