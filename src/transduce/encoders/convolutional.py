"""Convolutional encoder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from transduce.attention.positions import Learned, embedded_only
from transduce.contracts import Count, Encoder, FrontEnd, PositionEncoding, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.convolution import HALF, GatedConvolution
from transduce.layers.feed_forward import Dropout


class ConvolutionalEncoder(Encoder):
    """z^l = (glu(conv(z^{l-1})) + z^{l-1}) sqrt(1/2); the memory is (z^L + e) sqrt(1/2) (Gehring 2017)"""

    capturable = True

    def __init__(
        self,
        embedding: FrontEnd,
        *,
        layers: Count = 4,
        width: Count = 256,
        kernel: Count = 3,
        position: type[PositionEncoding] = Learned,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise InputError(f"a kernel of {kernel} has no middle row", remedy="set an odd kernel")
        self.width, self.embedding, self.dropout = width, embedding, Dropout(dropout)
        self.position = embedded_only(position(width, 1, False), "a convolution")
        self.sides = (kernel - 1) // 2
        self.layers = nn.ModuleList(GatedConvolution(width, kernel, dropout) for _ in range(layers))

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        mask = source.mask
        positions = torch.arange(mask.size(1), device=mask.device)[None]  # 1 S
        embedded = self.dropout(self.position.add(source.values, positions))
        values = embedded
        for layer in self.layers:
            # Padding is zeroed before every layer, so it cannot leak into real rows.
            padded = F.pad(values * mask[..., None], (0, 0, self.sides, self.sides))
            values = (layer(padded) + values) * HALF
        # The paper adds the embedding to the values, not to the keys; a memory has one vector per row.
        values = (values + embedded) * HALF
        return Memory(values, mask, masked_mean(values, mask), tokens=batch.source.ids)
