"""A trained recurrent layer in, the same with packed matrices out: its gates read through two linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from transduce.layers.recurrent import LayerState, reverse
from transduce.layers.stepping import STEPS
from transduce.precision.matrices import Packed


class PackedCells(nn.Module):
    """Stands for one layer of nn.RNN, nn.GRU or nn.LSTM, batch first, of one direction or both."""

    def __init__(self, layer: nn.RNNBase, kind: type[Packed]) -> None:
        super().__init__()
        assert layer.num_layers == 1, "a stack is made of single layers"
        assert layer.batch_first
        self.step = STEPS[type(layer)]
        ends = ("", "_reverse") if layer.bidirectional else ("",)
        self.ahead = nn.ModuleList(kind(_as_linear(layer, "ih", end)) for end in ends)
        self.back = nn.ModuleList(kind(_as_linear(layer, "hh", end)) for end in ends)

    def forward(
        self, inputs: Tensor | PackedSequence, first: Tensor | LayerState
    ) -> tuple[Tensor | PackedSequence, Tensor | LayerState]:
        """As torch's layers: rows R T D, states one direction after the other (. R W)."""
        begin = (first,) if isinstance(first, Tensor) else first
        if isinstance(inputs, Tensor):
            outputs, last = self._run(inputs, begin, None)
            return outputs, last[0] if isinstance(first, Tensor) else last
        values, lengths = pad_packed_sequence(inputs, batch_first=True)
        mask = torch.arange(values.size(1)) < lengths[:, None]
        outputs, last = self._run(values, begin, mask)
        packed = pack_padded_sequence(outputs, lengths, batch_first=True, enforce_sorted=False)
        return packed, last[0] if isinstance(first, Tensor) else last

    def _run(self, values: Tensor, begin: LayerState, mask: Tensor | None) -> tuple[Tensor, LayerState]:
        real = torch.ones(values.shape[:2], dtype=torch.bool) if mask is None else mask
        outputs, ends = [], []
        for number, (ahead, back) in enumerate(zip(self.ahead, self.back, strict=True)):
            gates = ahead(values if number == 0 else reverse(values, real))  # R T G
            state, made = tuple(part[number] for part in begin), []
            for place in range(values.size(1)):
                new = self.step(gates[:, place], back(state[0]), state)
                if mask is not None:
                    new = tuple(
                        torch.where(mask[:, place, None], one, old) for one, old in zip(new, state, strict=True)
                    )
                state = new
                made.append(state[0])
            found = torch.stack(made, 1)  # R T W
            outputs.append(found if number == 0 else reverse(found, real))
            ends.append(state)
        return torch.cat(outputs, -1), tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _as_linear(layer: nn.RNNBase, name: str, end: str) -> nn.Linear:
    """One of a layer's matrices with its bias."""
    weight = getattr(layer, f"weight_{name}_l0{end}")
    linear = nn.Linear(weight.size(1), weight.size(0), bias=layer.bias)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if layer.bias:
            linear.bias.copy_(getattr(layer, f"bias_{name}_l0{end}"))
    return linear
