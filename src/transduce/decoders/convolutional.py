"""Convolutional decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from transduce.attention.multihead import CrossAttention, layers_and_heads
from transduce.attention.normalisers import Softmax
from transduce.attention.positions import Learned, embedded_only
from transduce.attention.scores import Dot
from transduce.contracts import AttentionScore, Count, Decoder, Normaliser, PositionEncoding, Rate
from transduce.flow import Attention, Memory, State, Step
from transduce.layers.convolution import HALF, GatedConvolution, dilations
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout
from transduce.layers.option_groups import AttentionOptions


class ConvolutionalDecoder(Decoder):
    """causal gated convolutions, each followed by cross-attention (Gehring 2017)"""

    layers: Sequence[ConvolutionalDecoderLayer]

    def __init__(
        self,
        embedding: Embedding,
        output: Output,
        memory_width: int,
        *,
        layers: Count = 4,
        width: Count = 256,
        kernel: Count = 3,
        dilation: Count = 1,
        heads: Count = 1,
        position: type[PositionEncoding] = Learned,
        score: type[AttentionScore] = Dot,
        normaliser: type[Normaliser] = Softmax,
        dropout: Rate = 0.1,
    ) -> None:
        """`dilation`: growth of the distance between the rows of a convolution from layer to layer, see
        layers/convolution.py."""
        super().__init__()
        self.embedding, self.output, self.dropout = embedding, output, Dropout(dropout)
        self.position = embedded_only(position(width, 1, True), "a convolution")
        attention = AttentionOptions(heads, score=score, normaliser=normaliser)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            ConvolutionalDecoderLayer(
                GatedConvolution(width, kernel, dropout, distance),
                CrossAttention(width, memory_width, attention) if memory_width else None,
            )
            for distance in dilations(layers, kernel, dilation)
        )

    @property
    def attention_shape(self) -> tuple[int, int]:
        return layers_and_heads([block.cross_attention for block in self.layers])

    def start(self, memory: Memory) -> State:
        projected = tuple(
            block.cross_attention.keys_values(memory.values)
            for block in self.layers
            if block.cross_attention is not None
        )
        rows, table = memory.mask.size(0), self.embedding.weight
        # Rows of zeros before the first token, for each layer.
        before = tuple(table.new_zeros(rows, block.convolution.before, table.size(1)) for block in self.layers)
        next_position = torch.zeros(rows, dtype=torch.long, device=memory.mask.device)
        return State({"memory": projected, "mask": memory.mask}, {"layers": before, "next_position": next_position})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        rows, steps = tokens.shape
        lengths = torch.full((rows,), steps, device=tokens.device) if mask is None else mask.sum(1)
        positions = state.past["next_position"][:, None] + torch.arange(steps, device=tokens.device)  # R T
        embedded = self.dropout(self.position.add(self.embedding(tokens), positions))
        values = embedded
        after: list[Tensor] = []
        weights: list[Tensor] = []
        for number, block in enumerate(self.layers):
            inputs = torch.cat((state.past["layers"][number], values), 1)  # R (before + T) D
            after.append(_last(inputs, lengths, block.convolution.before))
            hidden = block.convolution(inputs)
            if block.cross_attention is not None:
                # The query is the hidden state plus the embedding of the previous token (equation 1).
                query = (hidden + embedded) * HALF
                context, layer_weights = block.cross_attention(
                    query, *state.fixed["memory"][number], state.fixed["mask"], with_attention=with_attention
                )
                hidden = (hidden + context) * HALF
                weights += [] if layer_weights is None else [layer_weights]
            values = (hidden + values) * HALF
        past = {"layers": tuple(after), "next_position": state.past["next_position"] + lengths}
        attention = Attention(torch.stack(weights, 1) if weights else None) if with_attention else None
        hidden = self.dropout(values)
        return Step(self.output(hidden), replace(state, past=past), attention, hidden)


class ConvolutionalDecoderLayer(nn.Module):
    """A causal convolution, and cross-attention where there is a memory."""

    def __init__(self, convolution: GatedConvolution, cross: CrossAttention | None) -> None:
        super().__init__()
        self.convolution, self.cross_attention = convolution, cross


def _last(inputs: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` real rows of each sequence, of `count` old and T new ones, `lengths` of which are real."""
    index = lengths[:, None] + torch.arange(count, device=lengths.device)  # R count
    return inputs.gather(1, index[..., None].expand(-1, -1, inputs.size(2)))
