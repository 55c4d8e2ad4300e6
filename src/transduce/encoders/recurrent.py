"""Recurrent encoders: RNN, GRU and LSTM layers, and ELMo."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from transduce.contracts import Count, Encoder, FrontEnd, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Memory
from transduce.kernels.recurrent import reverse
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, RecurrentStack


class RecurrentEncoder(Encoder):
    """h_t = f(x_t, h_{t-1}), one or both directions (Elman 1990, Hochreiter & Schmidhuber 1997, Cho 2014)"""

    capturable = True

    def __init__(
        self,
        embedding: FrontEnd,
        *,
        cell: Cell = "gru",
        layers: Count = 1,
        width: Count = 256,
        bidirectional: bool = True,
        residual: bool = False,
        reverse: bool = False,
        summary: Literal["top", "states"] = "top",
        dropout: Rate = 0.1,
    ) -> None:
        """The summary is the last hidden vector of the top layer; `states`: the last states of all layers,
        from which a decoder with `bridge: states` starts."""
        super().__init__()
        self.gives_states = summary == "states"
        self.width, self.embedding, self.reverse = width, embedding, reverse
        self.dropout = Dropout(dropout)
        self.rnn = RecurrentStack(
            embedding.width,
            width,
            cell,
            layers,
            bidirectional=bidirectional,
            residual=residual,
            dropout=dropout,
        )

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        mask, values = source.mask, source.values
        if self.reverse:
            values = reverse(values, mask)
        initial = self.rnn.zeros(mask.size(0), values)
        values, state = self.rnn(self.dropout(values), initial, mask, with_cells=self.gives_states)
        if self.reverse:  # row i of the memory belongs to token i
            values = reverse(values, mask)
        summary = torch.cat([part for layer in state for part in layer], -1) if self.gives_states else state[-1][0]
        return Memory(self.dropout(values), mask, summary, tokens=batch.source.ids)


class ElmoEncoder(Encoder):
    """gamma * sum_j softmax(w)_j [forward_j ; backward_j]: two independent recurrent stacks (Peters 2018)

    Layer 0 is the embedding, projected to half the width, for both directions. Pretrained with the head `bilm`; then
    `training.freeze: [encoder.forward_layers, encoder.backward_layers, encoder.embedding, encoder.input_proj]` trains
    only w and gamma on each task.
    """

    separate_directions = True
    capturable = True

    def __init__(
        self,
        embedding: FrontEnd,
        *,
        cell: Cell = "lstm",
        layers: Count = 2,
        width: Count = 256,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        if width % 2:
            raise InputError(f"two directions cannot share a width of {width}", remedy="set an even width")
        self.width, self.embedding, self.dropout = width, embedding, Dropout(dropout)
        self.input_proj = dense(embedding.width, width // 2)
        self.forward_layers, self.backward_layers = (
            nn.ModuleList(RecurrentStack(width // 2, width // 2, cell, 1) for _ in range(layers)) for _ in range(2)
        )
        self.layer_weights, self.gamma = nn.Parameter(torch.zeros(layers + 1)), nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        mask, values = source.mask, self.input_proj(source.values)  # B S D/2
        forward = self._layers(self.forward_layers, values, mask)
        backward = [reverse(layer, mask) for layer in self._layers(self.backward_layers, reverse(values, mask), mask)]
        layers = torch.stack([torch.cat(pair, -1) for pair in zip(forward, backward, strict=True)])  # L B S D
        mixed = self.gamma * torch.einsum("l,lbsd->bsd", self.layer_weights.softmax(0), layers)
        last = (mask.sum(1) - 1)[:, None, None].expand(-1, -1, self.width // 2)
        half = mixed.size(-1) // 2
        # The last state of each direction.
        summary = torch.cat((mixed[..., :half].gather(1, last).squeeze(1), mixed[:, 0, half:]), -1)
        return Memory(self.dropout(mixed), mask, summary, tokens=batch.source.ids)

    def _layers(self, stacks: nn.ModuleList, values: Tensor, mask: Tensor) -> list[Tensor]:
        """The input and the output of each layer; layers are residual, as in the paper."""
        layers = [values]
        for stack in stacks:
            assert isinstance(stack, RecurrentStack)
            inputs = self.dropout(layers[-1])
            outputs, _ = stack(inputs, stack.zeros(mask.size(0), values), mask, with_cells=False)
            layers.append(outputs + inputs)
        return layers
