"""Recurrent encoder."""

from __future__ import annotations

from typing import Literal

import torch

from transduce.contracts import Count, Encoder, FrontEnd, Rate
from transduce.flow import Batch, Memory
from transduce.layers.feed_forward import Dropout
from transduce.layers.recurrent import Cell, RecurrentStack, reverse


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
        values, state = self.rnn(self.dropout(values), initial, mask, cells=self.gives_states)
        if self.reverse:  # row i of the memory belongs to token i
            values = reverse(values, mask)
        summary = torch.cat([part for layer in state for part in layer], -1) if self.gives_states else state[-1][0]
        return Memory(self.dropout(values), mask, summary, tokens=batch.source.ids)
