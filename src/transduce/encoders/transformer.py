"""Transformer and Conformer encoders."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.positions import RelativeBias
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import Count, Encoder, FrontEnd, PositionEncoding, Rate, SequenceContext
from transduce.errors import InputError
from transduce.flow import Batch, Memory, masked_mean
from transduce.layers.feed_forward import Dropout, FeedForward
from transduce.layers.norm import NORMALISATIONS, LayerNorm
from transduce.layers.option_groups import AttentionOptions, SublayerOptions, flat_options
from transduce.layers.transformer import StackOptions, TransformerStack


class TransformerEncoder(TransformerStack, Encoder):
    """layers of self-attention and feed-forward (Vaswani 2017)"""

    capturable = True

    @flat_options
    def __init__(self, embedding: FrontEnd, *, stack: StackOptions, causal: bool = False) -> None:
        """`causal`: a row attends to itself and earlier rows alone, as in a decoder."""
        self.causal = causal  # positions depend on it
        super().__init__(embedding, stack)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source, layout = self.embedding.rows(batch.source), batch.source.layout
        mask, segment_ids = source.mask, None if layout is None else layout.segment_ids
        positions = torch.arange(mask.size(1), device=mask.device)[None] if layout is None else layout.positions  # . S
        everywhere = mask[:, None, None] if layout is None else layout.same_segment(layout.segment_ids)  # B 1 . S
        sequence = SequenceContext(
            self.position,
            positions,
            positions,
            self._visible(everywhere),
            real=mask,
            padded=True,
            with_attention=with_attention,
            global_mask=everywhere,
        )
        embedded = self.embed(source.values, positions, mask)
        output = self.run_layers(embedded, self.start_layers(mask.size(0)), sequence)
        values = output.values.to(embedded)  # in the dtype of the embeddings, for any decoder
        summary = masked_mean(values, mask)
        return Memory(values, mask, summary, output.self_attention, batch.source.ids, segment_ids)

    def _visible(self, visible: Tensor) -> Tensor:
        """The attention mask within the window, from the padding (B 1 1 S) or packing mask (B 1 S S)."""
        if self.window is None and not self.causal:
            return visible
        columns = visible.size(-1)
        window = columns if self.window is None else self.window
        near = torch.ones(columns, columns, dtype=torch.bool, device=visible.device)
        near = near.tril(0 if self.causal else window).triu(-window)
        # A padded row far from all real rows attends to itself: the softmax of an empty row would be nan.
        return visible & near | torch.eye(columns, dtype=torch.bool, device=visible.device)  # B 1 S S


class ConformerEncoder(Encoder):
    """x + 1/2 FFN, + self-attention, + convolution, + 1/2 FFN, norm, in each layer (Gulati 2020)"""

    capturable = True

    def __init__(
        self,
        embedding: FrontEnd,
        *,
        layers: Count = 4,
        width: Count = 256,
        heads: Count = 4,
        ff_width: Count = 1024,
        kernel: Count = 15,
        norm_kind: Literal["batch", "layer"] = "layer",
        position: type[PositionEncoding] = RelativeBias,
        dropout: Rate = 0.1,
    ) -> None:
        """`norm_kind`: the norm of the convolutions; the paper uses batch norm, see layers/norm.py."""
        super().__init__()
        if kernel % 2 == 0:
            raise InputError(f"a kernel of {kernel} has no middle row", remedy="set an odd kernel")
        self.width, self.embedding, self.dropout = width, embedding, Dropout(dropout)
        self.position = position(width, heads, False)
        sublayers = SublayerOptions(AttentionOptions(heads, attention_dropout=dropout))
        # Not `layers`: parameter sharing matches weights by name, and these layers are not those of a Transformer.
        self.conformer_layers = nn.ModuleList(
            ConformerLayer(
                SelfAttention(width, sublayers),
                ConvolutionModule(width, kernel, NORMALISATIONS[norm_kind](width)),
                FeedForward(width, ff_width, "silu", dropout),
                FeedForward(width, ff_width, "silu", dropout),
                dropout,
            )
            for _ in range(layers)
        )

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Memory:
        assert batch.source is not None, "this encoder reads the source of a batch"
        source = self.embedding.rows(batch.source)
        mask = source.mask
        positions = torch.arange(mask.size(1), device=mask.device)[None]  # 1 S
        sequence = SequenceContext(
            self.position, positions, positions, mask[:, None, None], real=mask, with_attention=with_attention
        )
        values = self.dropout(self.position.add(source.values, positions))
        attention: list[Tensor] = []
        for layer in self.conformer_layers:
            values, weights = layer(values, sequence)
            attention += [] if weights is None else [weights]
        values = values.to(source.values)
        weights = torch.stack(attention, 1) if attention else None
        return Memory(values, mask, masked_mean(values, mask), weights, batch.source.ids)


class ConformerLayer(nn.Module):
    """Half a feed-forward step, self-attention, convolution, half a feed-forward step, and a final norm."""

    def __init__(
        self,
        self_attention: SelfAttention,
        convolution: ConvolutionModule,
        feed_forward1: FeedForward,
        feed_forward2: FeedForward,
        dropout: float,
    ) -> None:
        super().__init__()
        width = convolution.width
        self.self_attention, self.convolution = self_attention, convolution
        self.feed_forward1, self.feed_forward2 = feed_forward1, feed_forward2
        self.feed_forward1_norm, self.self_attention_norm = LayerNorm(width), LayerNorm(width)
        self.convolution_norm, self.feed_forward2_norm = LayerNorm(width), LayerNorm(width)
        self.final_norm, self.dropout = LayerNorm(width), Dropout(dropout)

    def forward(self, values: Tensor, sequence: SequenceContext) -> tuple[Tensor, Tensor | None]:
        values = values + self.dropout(self.feed_forward1(self.feed_forward1_norm(values))) / 2
        past = self.self_attention.start(len(values), values)
        context, _, weights = self.self_attention(self.self_attention_norm(values), past, sequence)
        values = values + self.dropout(context)
        assert sequence.real is not None
        values = values + self.dropout(self.convolution(self.convolution_norm(values), sequence.real))
        values = values + self.dropout(self.feed_forward2(self.feed_forward2_norm(values))) / 2
        return self.final_norm(values), weights


class ConvolutionModule(nn.Module):
    """W2 swish(norm(depthwise(glu(W1 x)))): a depthwise convolution over neighbouring rows, without padding"""

    def __init__(self, width: int, kernel: int, norm: nn.Module) -> None:
        super().__init__()
        self.width, self.norm = width, norm
        self.pointwise_conv1 = nn.Linear(width, 2 * width, bias=False)
        self.pointwise_conv2 = nn.Linear(width, width, bias=False)
        self.depthwise_conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width, bias=False)

    def forward(self, values: Tensor, real: Tensor) -> Tensor:
        # Padding is zero, like the padding of the convolution.
        gated = F.glu(self.pointwise_conv1(values), -1) * real[..., None]
        convolved = self.depthwise_conv(gated.transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.pointwise_conv2(F.silu(self.norm(convolved, real)))
        return result
