"""Convolutional encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from transduce.attention.positions import Learned, embedded_only
from transduce.contracts import Encoder, FrontEnd, PositionEncoding
from transduce.errors import InputError
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.convolution import HALF, ConvolutionOptions, GatedConvolution
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.option_groups import flat_options


class ConvolutionalEncoder(Encoder):
    """z^l = (glu(conv(z^{l-1})) + z^{l-1}) sqrt(1/2); the memory is (z^L + e) sqrt(1/2) (Gehring 2017)"""

    capturable = True

    @flat_options
    def __init__(
        self,
        embedding: FrontEnd,
        *,
        convolutions: ConvolutionOptions,
        causal: bool = False,
        position: type[PositionEncoding] = Learned,
        separate_keys: bool = False,
    ) -> None:
        """`causal`: a row depends on itself and earlier rows alone; `separate_keys`: a row of the memory is
        [z^L; (z^L + e) sqrt(1/2)], the keys and the values of the paper."""
        super().__init__()
        kernels, outer = convolutions.kernels or (convolutions.kernel,), convolutions.outer_width
        if (even := [kernel for kernel in kernels if kernel % 2 == 0]) and not causal:
            raise InputError(f"a kernel of {even[0]} has no middle row", remedy="set an odd kernel, or causal: true")
        self.width, self.embedding = outer * (2 if separate_keys else 1), embedding
        self.dropout = Dropout(convolutions.dropout)
        self.position = embedded_only(position(outer, 1, False), "a convolution")
        self.causal, self.separate_keys = causal, separate_keys
        layers = convolutions.make()
        self.embedding_proj = convolutions.make_embedding_proj()
        self.memory_proj = None if convolutions.embedding_width is None else dense(convolutions.width, outer)
        self.layers: Sequence[GatedConvolution] = nn.ModuleList(layers)  # type: ignore[assignment]

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
