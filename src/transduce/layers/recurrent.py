"""A sequence of vectors and a state in, a sequence and a state out: stacks of recurrent cells."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from transduce.errors import InputError

Cell = Literal["rnn", "gru", "lstm"]
CELLS: dict[str, type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]] = {
    "rnn": nn.RNN,
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}

LayerState = tuple[Tensor, ...]  # (hidden,) or (hidden, cell): each R W, both directions side by side


class RecurrentStack(nn.Module):
    """Layers of one cell kind. One call may read one step or all of them: the cells are the same."""

    def __init__(
        self,
        input_width: int,
        width: int,
        cell: Cell,
        layers: int,
        *,
        bidirectional: bool = False,
        residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.residual = width, residual
        self.directions = 2 if bidirectional else 1
        if width % self.directions:
            raise InputError(
                f"two directions cannot share a width of {width}", remedy="an even width, or bidirectional: false"
            )
        self.tensors = 2 if cell == "lstm" else 1  # what a layer's state is made of
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            CELLS[cell](
                input_width if layer == 0 else width,
                width // self.directions,
                batch_first=True,
                bidirectional=bidirectional,
            )
            for layer in range(layers)
        )

    def zeros(self, rows: int, like: Tensor) -> tuple[LayerState, ...]:
        empty = like.new_zeros(rows, self.width)
        return tuple((empty,) * self.tensors for _ in self.layers)

    def forward(
        self, values: Tensor, state: tuple[LayerState, ...], mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """values (R T D), right-padded as mask (R T) says -> values (R T W), the state after each last real step."""
        ends: list[LayerState] = []
        lengths = None if mask is None else mask.sum(1).cpu()
        for number, (layer, begin) in enumerate(zip(self.layers, state, strict=True)):
            inputs = values if number == 0 else self.dropout(values)
            outputs, end = self._layer(layer, inputs, begin, lengths)
            values = outputs + inputs if self.residual and outputs.shape == inputs.shape else outputs
            ends.append(end)
        return values, tuple(ends)

    def _layer(
        self, layer: nn.Module, inputs: Tensor, begin: LayerState, lengths: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        steps = inputs.size(1)
        hidden = tuple(part.unflatten(1, (self.directions, -1)).transpose(0, 1).contiguous() for part in begin)
        first = hidden if self.tensors == 2 else hidden[0]
        if lengths is None:
            outputs, last = layer(inputs, first)
        else:
            packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
            outputs, last = layer(packed, first)
            outputs = pad_packed_sequence(outputs, batch_first=True, total_length=steps)[0]
        parts = last if self.tensors == 2 else (last,)
        return outputs, tuple(part.transpose(0, 1).flatten(1) for part in parts)


def reverse(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's real steps backwards, the padding where it was (Sutskever 2014)."""
    steps = torch.arange(mask.size(1), device=mask.device)
    index = torch.where(mask, mask.sum(1, keepdim=True) - 1 - steps, steps)  # R T
    return values.gather(1, index[..., None].expand_as(values))
