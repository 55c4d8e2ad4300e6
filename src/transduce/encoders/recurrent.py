"""Source ids in, a memory out: hidden states of a recurrent network, and its last state as the summary."""

from __future__ import annotations

from torch import nn

from transduce.contracts import Count, Encoder, Rate
from transduce.flow import Batch, Memory
from transduce.layers.embedding import Embedding
from transduce.layers.recurrent import Cell, RecurrentStack, reverse


class RecurrentEncoder(Encoder):
    """h_t = f(x_t, h_{t-1}), one or both directions (Elman 1990, Hochreiter & Schmidhuber 1997, Cho 2014)"""

    def __init__(
        self,
        embedding: Embedding,
        *,
        cell: Cell = "gru",
        layers: Count = 1,
        width: Count = 256,
        bidirectional: bool = True,
        residual: bool = False,
        reverse: bool = False,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        self.width, self.embedding, self.reverse = width, embedding, reverse
        self.dropout = nn.Dropout(dropout)
        self.stack = RecurrentStack(
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
        mask = batch.source.mask
        values = self.embedding(batch.source.values)
        if self.reverse:
            values = reverse(values, mask)
        values, state = self.stack(self.dropout(values), self.stack.zeros(mask.size(0), values), mask)
        if self.reverse:  # row i of the memory belongs to token i, whatever the order of reading
            values = reverse(values, mask)
        return Memory(self.dropout(values), mask, summary=state[-1][0], tokens=batch.source.values)
