"""Identity encoder: the memory is the output of the front end."""

from __future__ import annotations

from transduce.contracts import Count, Encoder, FrontEnd, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.feed_forward import Dropout


class IdentityEncoder(Encoder):
    """the rows of the front end unchanged, with their mean as the summary (Xu 2015)"""

    capturable = True

    def __init__(self, embedding: FrontEnd, *, width: Count = 256, dropout: Rate = 0.1) -> None:
        super().__init__()
        if embedding.width != width:
            raise InputError(f"the identity encoder keeps rows of width {embedding.width}; they cannot become {width}")
        self.width, self.embedding, self.dropout = width, embedding, Dropout(dropout)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        values = self.dropout(source.values)
        return Memory(values, source.mask, masked_mean(values, source.mask), tokens=batch.source.ids)
