"""Convolutional decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from transduce.attention.multihead import CrossAttention, layers_and_heads
from transduce.attention.positions import Learned, embedded_only
from transduce.attention.scores import ScaledDot, Softmax
from transduce.contracts import AttentionScore, Count, Decoder, Normaliser, PositionEncoding
from transduce.flow import Attention, Memory, State, Step
from transduce.layers.convolution import HALF, ConvolutionOptions, GatedConvolution
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.option_groups import AttentionOptions, flat_options


class ConvolutionalDecoder(Decoder):
    """causal gated convolutions, each followed by cross-attention (Gehring 2017)"""

    layers: Sequence[ConvolutionalDecoderLayer]

    @flat_options
    def __init__(
        self,
        embedding: Embedding,
        output: Output,
        memory_width: int,
        *,
        convolutions: ConvolutionOptions,
        heads: Count = 1,
        position: type[PositionEncoding] = Learned,
        score: type[AttentionScore] = ScaledDot,
        normaliser: type[Normaliser] = Softmax,
        scale_context: bool = False,
    ) -> None:
        """`scale_context`: contexts are multiplied by the root of the source length. The paper has this, embeddings of
        a standard deviation of 0.1 and no scale in the score; ours have 1, with which unscaled attention would be
        saturated at the start."""
        super().__init__()
        self.embedding, self.output, self.dropout = embedding, output, Dropout(convolutions.dropout)
        self.scale_context, outer = scale_context, convolutions.outer_width
        self.position = embedded_only(position(outer, 1, True), "a convolution")
        layers = convolutions.make()
        self.embedding_proj = convolutions.make_embedding_proj()
        attention = AttentionOptions(heads, score=score, normaliser=normaliser)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            ConvolutionalDecoderLayer(
                convolution,
                CrossAttention(outer, memory_width, attention) if memory_width else None,
                None if convolutions.embedding_width is None and convolution.width == outer else outer,
            )
            for convolution in layers
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
        convolutions = [block.convolution for block in self.layers]
        # Rows of zeros before the first token, for each layer.
        before = tuple(table.new_zeros(rows, one.before, one.input_width) for one in convolutions)
        next_position = torch.zeros(rows, dtype=torch.long, device=memory.mask.device)
        return State({"memory": projected, "mask": memory.mask}, {"layers": before, "next_position": next_position})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        rows, steps = tokens.shape
        lengths = torch.full((rows,), steps, device=tokens.device) if mask is None else mask.sum(1)
        positions = state.past["next_position"][:, None] + torch.arange(steps, device=tokens.device)  # R T
        embedded = self.dropout(self.position.add(self.embedding(tokens), positions))
        values = embedded if self.embedding_proj is None else self.embedding_proj(embedded)
        scale = _root_lengths(state.fixed["mask"], rows) if self.scale_context else None
        after: list[Tensor] = []
        weights: list[Tensor] = []
        for number, block in enumerate(self.layers):
            inputs = torch.cat((state.past["layers"][number], values), 1)  # R (before + T) D
            after.append(_last(inputs, lengths, block.convolution.before))
            hidden = block.convolution(inputs)
            if block.cross_attention is not None:
                # The query is the hidden state plus the embedding of the previous token (equation 1).
                query = ((hidden if block.query_proj is None else block.query_proj(hidden)) + embedded) * HALF
                context, layer_weights = block.cross_attention(
                    query, *state.fixed["memory"][number], state.fixed["mask"], with_attention=with_attention
                )
                context = context if scale is None else context * scale
                hidden = (hidden + (context if block.context_proj is None else block.context_proj(context))) * HALF
                weights += [] if layer_weights is None else [layer_weights]
            values = (hidden + block.convolution.residual(values)) * HALF
        past = {"layers": tuple(after), "next_position": state.past["next_position"] + lengths}
        attention = Attention(torch.stack(weights, 1) if weights else None) if with_attention else None
        hidden = self.dropout(values)
        return Step(self.output(hidden), replace(state, past=past), attention, hidden)


class ConvolutionalDecoderLayer(nn.Module):
    """A causal convolution, and cross-attention where there is a memory.

    `outer`: the width of queries and contexts, where linear layers lead to it and back.
    """

    def __init__(self, convolution: GatedConvolution, cross: CrossAttention | None, outer: int | None = None) -> None:
        super().__init__()
        self.convolution, self.cross_attention = convolution, cross
        outer = None if cross is None else outer
        self.query_proj = None if outer is None else dense(convolution.width, outer)
        self.context_proj = None if outer is None else dense(outer, convolution.width)


def _root_lengths(mask: Tensor, rows: int) -> Tensor:
    """The root of the source length: B S or B T S -> R 1 1 or R T 1."""
    lengths = mask.sum(-1).sqrt().repeat_interleave(rows // mask.size(0), 0)  # R or R T
    return lengths.view(rows, -1, 1)


def _last(inputs: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` real rows of each sequence, of `count` old and T new ones, `lengths` of which are real."""
    index = lengths[:, None] + torch.arange(count, device=lengths.device)  # R count
    return inputs.gather(1, index[..., None].expand(-1, -1, inputs.size(2)))
