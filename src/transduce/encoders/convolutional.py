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
from transduce.layers.feed_forward import HALF, Dropout, GatedConvolution, dense, gated_convolutions


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
        widths: tuple[Count, ...] = (),
        kernels: tuple[Count, ...] = (),
        dilation: Count = 1,
        causal: bool = False,
        position: type[PositionEncoding] = Learned,
        embedding_width: Count | None = None,
        separate_keys: bool = False,
        dropout: Rate = 0.1,
    ) -> None:
        """`dilation`: growth of the distance between the rows of a convolution from layer to layer, see
        layers/feed_forward.py; `widths`, `kernels`: those of each layer, where they differ; `causal`: a row depends on
        itself and earlier rows alone; `embedding_width`: of embeddings and memory, with linear layers before and after
        the convolutions; `separate_keys`: a row of the memory is [z^L; (z^L + e) sqrt(1/2)], the keys and the values
        of the paper."""
        super().__init__()
        if (even := [one for one in kernels or (kernel,) if one % 2 == 0]) and not causal:
            raise InputError(f"a kernel of {even[0]} has no middle row", remedy="set an odd kernel, or causal: true")
        outer = embedding_width or width
        self.width, self.embedding, self.dropout = outer * (2 if separate_keys else 1), embedding, Dropout(dropout)
        self.position = embedded_only(position(outer, 1, False), "a convolution")
        self.causal, self.separate_keys = causal, separate_keys
        convolutions = gated_convolutions(
            layers, width, kernel, dropout, dilation=dilation, widths=widths, kernels=kernels
        )
        first = (*widths, width)[0]
        self.embedding_proj = None if embedding_width is None and first == outer else dense(outer, first)
        self.memory_proj = None if embedding_width is None else dense(width, embedding_width)
        self.layers: Sequence[GatedConvolution] = nn.ModuleList(convolutions)  # type: ignore[assignment]

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        mask = source.mask
        positions = torch.arange(mask.size(1), device=mask.device)[None]  # 1 S
        embedded = self.dropout(self.position.add(source.values, positions))
        values = embedded if self.embedding_proj is None else self.embedding_proj(embedded)
        for layer in self.layers:
            # Padding is zeroed before every layer, so it cannot leak into real rows.
            left, right = (layer.before, 0) if self.causal else (layer.before // 2,) * 2
            padded = F.pad(values * mask[..., None], (0, 0, left, right))
            values = (layer(padded) + layer.residual(values)) * HALF
        keys = values if self.memory_proj is None else self.memory_proj(values)
        # The paper adds the embedding to the values, not to the keys.
        values = (keys + embedded) * HALF
        values = torch.cat((keys, values), -1) if self.separate_keys else values
        return Memory(values, mask, masked_mean(values, mask), tokens=batch.source.ids)
