"""A value and a layer in, the value plus what the layer adds out, normalised before or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

Place = Literal["before", "after"]


class Residual(nn.Module):
    """before: x + f(norm(x)) (Xiong 2020); after: norm(x + f(x)) (Vaswani 2017)"""

    def __init__(self, width: int, place: Place, dropout: float) -> None:
        super().__init__()
        self.norm, self.place, self.dropout = nn.LayerNorm(width), place, nn.Dropout(dropout)

    def forward(self, values: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.place == "before":
            return values + self.dropout(layer(self.norm(values)))
        result: Tensor = self.norm(values + self.dropout(layer(values)))
        return result
