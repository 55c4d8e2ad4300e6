"""Recurrent stacks: RNN, GRU and LSTM layers, over whole sequences or step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import InputError
from transduce.kernels.dispatch import compiling, has_hooks, matmul_dtype
from transduce.kernels.recurrent import StepLinear, recurrent_layer
from transduce.layers.feed_forward import Dropout

Cell = Literal["rnn", "gru", "lstm"]
CELLS: dict[str, type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]] = {
    "rnn": nn.RNN,
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}

LayerState = tuple[Tensor, ...]  # (hidden,) or (hidden, cell): each R W, both directions side by side


class RecurrentStack(nn.Module):
    """A stack of layers of one cell kind; a call processes one step or many."""

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
        self.tensors = 2 if cell == "lstm" else 1  # tensors in the state of a layer
        self.dropout = Dropout(dropout)
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
        self, values: Tensor, state: tuple[LayerState, ...], mask: Tensor | None = None, *, with_cells: bool = True
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """values (R T D) with a right-padding mask (R T) -> values (R T W), the state after the last real step.

        Without `with_cells`, the state is without the cell states of an LSTM, which most encoders do not need.
        """
        ends: list[LayerState] = []
        for number, (layer, begin) in enumerate(zip(self.layers, state, strict=True)):
            inputs = values if number == 0 else self.dropout(values)
            outputs, end = self._layer(layer, inputs, begin, mask, with_cells)
            values = outputs + inputs if self.residual and outputs.shape == inputs.shape else outputs
            ends.append(end if with_cells else end[:1])
        return values, tuple(ends)

    def _layer(
        self, layer: nn.Module, inputs: Tensor, begin: LayerState, mask: Tensor | None, with_cells: bool
    ) -> tuple[Tensor, LayerState]:
        hidden = tuple(part.unflatten(1, (self.directions, -1)).transpose(0, 1).contiguous() for part in begin)
        outputs, parts = recurrent_layer(layer, inputs, hidden, mask, with_cells)
        return outputs, tuple(part.transpose(0, 1).flatten(1) for part in parts)


# One step of a cell, given W x + b and U h + c for all gates (R G) and the state (h,) or (h, c).
def rnn_step(inputs: Tensor, recurrent: Tensor, state: LayerState) -> LayerState:
    """h' = tanh(W x + U h)"""
    return (torch.tanh(inputs + recurrent),)


def gru_step(inputs: Tensor, recurrent: Tensor, state: LayerState) -> LayerState:
    """n = tanh(W x + r * U h), h' = n + z * (h - n) (Cho 2014)"""
    width = state[0].size(-1)
    reset, update = torch.sigmoid(inputs[:, : 2 * width] + recurrent[:, : 2 * width]).chunk(2, -1)
    new = torch.addcmul(inputs[:, 2 * width :], reset, recurrent[:, 2 * width :]).tanh()
    return (torch.lerp(new, state[0].to(new.dtype), update),)


def lstm_step(inputs: Tensor, recurrent: Tensor, state: LayerState) -> LayerState:
    """c' = f * c + i * g, h' = o * tanh(c') (Hochreiter & Schmidhuber 1997)"""
    input_gate, forget_gate, new, output_gate = (inputs + recurrent).chunk(4, -1)
    cell = torch.addcmul(torch.sigmoid(forget_gate) * state[1], torch.sigmoid(input_gate), torch.tanh(new))
    return torch.sigmoid(output_gate) * torch.tanh(cell), cell


STEPS: dict[type, Callable[[Tensor, Tensor, LayerState], LayerState]] = {
    nn.RNN: rnn_step,
    nn.GRU: gru_step,
    nn.LSTM: lstm_step,
}


class StepwiseRecurrence:
    """Stepwise run of a stack over `values` (R T D), with a further input at each step, such as a context vector.

    The products of `values` with the input weights are computed for all steps at once.
    """

    def __init__(self, stack: RecurrentStack, values: Tensor) -> None:
        self.stack, dtype = stack, matmul_dtype(values)
        layers: list[Any] = list(stack.layers)
        weight, bias, width = layers[0].weight_ih_l0, layers[0].bias_ih_l0, values.size(-1)
        self.projected = F.linear(values, weight[:, :width], bias).unbind(1)  # T times R G
        self.input_proj = [StepLinear(weight[:, width:], None, dtype)]
        self.input_proj += [StepLinear(layer.weight_ih_l0, layer.bias_ih_l0, dtype) for layer in layers[1:]]
        self.hidden_proj = [StepLinear(layer.weight_hh_l0, layer.bias_hh_l0, dtype) for layer in layers]

    @staticmethod
    def applies(stack: RecurrentStack, values: Tensor) -> bool:
        """Whether it can be used and is faster: in training, over several steps, with torch's cells without hooks."""
        if not all(type(layer) in STEPS and not has_hooks(layer) for layer in stack.layers):
            return False
        # A residual connection around the first layer needs its whole input.
        residual = stack.residual and stack.layers[0].input_size == stack.width
        return torch.is_grad_enabled() and values.size(1) > 1 and not residual and not compiling()

    def __call__(
        self, step: int, fed: Tensor | None, state: tuple[LayerState, ...]
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """fed (R 1 F), the state -> hidden (R 1 W), the next state."""
        stack, ends, values = self.stack, list[LayerState](), self.projected[step]
        for number, (layer, begin) in enumerate(zip(stack.layers, state, strict=True)):
            inputs = values if number == 0 else stack.dropout(values)
            if number > 0:
                gates = self.input_proj[number](inputs)
            else:
                gates = inputs if fed is None else self.input_proj[0](fed[:, 0], inputs)
            end = STEPS[type(layer)](gates, self.hidden_proj[number](begin[0]), begin)
            values = end[0] + inputs if stack.residual and number > 0 else end[0]
            ends.append(end)
        return values[:, None], tuple(ends)
