"""A value and what a layer made of it in, their normalised sum out: normalised before or after the layer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from transduce.layers.dropout import Dropout, add_dropped

Place = Literal["before", "after"]


class Residual(nn.Module):
    """before: x + f(norm(x)) (Xiong 2020); after: norm(x + f(x)) (Vaswani 2017)"""

    def __init__(self, norm: nn.Module, place: Place, dropout: float) -> None:
        super().__init__()
        self.norm, self.place, self.dropout = norm, place, Dropout(dropout)

    def enter(self, values: Tensor, real: Tensor | None) -> Tensor:
        """What the layer reads."""
        result: Tensor = self.norm(values, real) if self.place == "before" else values
        return result

    def leave(self, values: Tensor, change: Tensor, real: Tensor | None) -> Tensor:
        """What goes on, once the layer has spoken."""
        total = add_dropped(values, change, self.dropout)
        result: Tensor = total if self.place == "before" else self.norm(total, real)
        return result
