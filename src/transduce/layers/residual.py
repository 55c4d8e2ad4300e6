"""A value and what a layer made of it in, their normalised sum out: normalised before or after the layer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from transduce.layers import levelling
from transduce.layers.dropout import Dropout, add_dropped

Place = Literal["before", "after"]


class Sum(NamedTuple):
    """values + dropout(change), not yet made: the norm that comes next makes it in the same pass over them."""

    values: Tensor
    change: Tensor
    rate: float

    def made(self) -> Tensor:
        return levelling.add(*self)


class Twice(NamedTuple):
    """The same values for the sum and for the layer, so that their gradients meet in the kernel that made them."""

    values: Tensor
    rows: Tensor


Flow = Tensor | Sum | Twice  # what goes from one layer to the next


class Residual(nn.Module):
    """before: x + f(norm(x)) (Xiong 2020); after: norm(x + f(x)) (Vaswani 2017)"""

    def __init__(self, norm: nn.Module, place: Place, dropout: float) -> None:
        super().__init__()
        self.norm, self.place, self.dropout = norm, place, Dropout(dropout)

    def enter(self, values: Flow, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The values themselves, and what the layer reads of them."""
        if isinstance(values, Twice):
            return values
        if self.place == "before":
            return level(self.norm, values, real)
        assert isinstance(values, Tensor)
        return values, values

    def leave(self, values: Tensor, change: Tensor, real: Tensor | None) -> Flow:
        """What goes on, once the layer has spoken."""
        if levelling.suits(values, change):
            rate = self.dropout.p if self.dropout.training else 0.0
            if self.place == "before":
                return Sum(values, change, rate)
            if levelling.levels(self.norm):
                return Twice(*levelling.level_twice(self.norm, values, change, rate))
        total = add_dropped(values, change, self.dropout)
        result: Tensor = total if self.place == "before" else self.norm(total, real)
        return result


def level(norm: nn.Module, values: Flow, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values, made where they were not, and their norm."""
    if isinstance(values, Sum):
        if levelling.levels(norm):
            return levelling.level_sum(norm, *values)
        values = values.made()
    assert isinstance(values, Tensor)
    return values, norm(values, real)
