"""Convolutional encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from transduce.attention.positions import Learned, embedded_only
from transduce.contracts import Count, Encoder, FrontEnd, PositionEncoding, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.convolution import HALF, GatedConvolution, dilations
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
        dilation: Count = 1,
        causal: bool = False,
        position: type[PositionEncoding] = Learned,
        dropout: Rate = 0.1,
    ) -> None:
        """`dilation`: growth of the distance between the rows of a convolution from layer to layer, see
        layers/convolution.py; `causal`: a row depends on itself and earlier rows alone."""
        super().__init__()
        if kernel % 2 == 0 and not causal:
            raise InputError(f"a kernel of {kernel} has no middle row", remedy="set an odd kernel, or causal: true")
        self.width, self.embedding, self.dropout = width, embedding, Dropout(dropout)
        self.position = embedded_only(position(width, 1, False), "a convolution")
        self.causal = causal
        self.layers: Sequence[GatedConvolution] = nn.ModuleList(  # type: ignore[assignment]
            GatedConvolution(width, kernel, dropout, distance) for distance in dilations(layers, kernel, dilation)
        )

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        mask = source.mask
        positions = torch.arange(mask.size(1), device=mask.device)[None]  # 1 S
        embedded = self.dropout(self.position.add(source.values, positions))
        values = embedded
        for layer in self.layers:
            # Padding is zeroed before every layer, so it cannot leak into real rows.
            left, right = (layer.before, 0) if self.causal else (layer.before // 2,) * 2
            padded = F.pad(values * mask[..., None], (0, 0, left, right))
            values = (layer(padded) + values) * HALF
        # The paper adds the embedding to the values, not to the keys; a memory has one vector per row.
        values = (values + embedded) * HALF
        return Memory(values, mask, masked_mean(values, mask), tokens=batch.source.ids)
