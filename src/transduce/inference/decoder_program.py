"""Decoder programs: the lowered form of a Transformer decoder, and the conditions for lowering one.

A program is the description of one decoding step: an entry (embeddings and positions), blocks, and an output (final
norm and output layer). A backend (backends.py) compiles it to torch operations, Triton kernels or native calls. All
other calls of a lowered decoder, such as a prefix or a request for attention weights, run the modules.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from transduce.attention.multihead import CrossAttention, MultiHeadAttention
from transduce.attention.positions import Learned, NoPosition, Sinusoidal, position_in_embedding
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import AttentionScore
from transduce.decoders.transformer import TransformerDecoder
from transduce.flow import State, Step, TopK, TopKRequest
from transduce.kernels.dispatch import has_hooks
from transduce.kernels.linear import PackedLinear
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import FeedForward
from transduce.layers.norm import LayerNorm
from transduce.layers.transformer import TransformerLayer


def concatenate(layers: list[nn.Linear]) -> nn.Linear:
    """[W1; W2; ...] x + [b1; b2; ...]"""
    first, size = layers[0], sum(layer.out_features for layer in layers)
    joint = nn.Linear(first.in_features, size, first.bias is not None, first.weight.device, first.weight.dtype)
    with torch.no_grad():
        joint.weight.copy_(torch.cat([layer.weight for layer in layers]))
        if first.bias is not None:
            joint.bias.copy_(torch.cat([layer.bias for layer in layers]))
    return joint


def has_projections(attention: MultiHeadAttention) -> bool:
    return all(isinstance(part, nn.Linear) for part in (attention.q_proj, attention.k_proj, attention.v_proj))


class JointSelfAttention(SelfAttention):
    """Self-attention with one projection to queries, keys and values."""

    def __init__(self, plain: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_width = plain.heads, plain.kv_heads, plain.head_width
        self.out_proj, self.attend = plain.out_proj, plain.attend
        self.qkv_proj = concatenate([plain.q_proj, plain.k_proj, plain.v_proj])  # type: ignore[list-item]

    def queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joint = self.qkv_proj(rows).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        query, keys, values = joint.split((self.heads, self.kv_heads, self.kv_heads), 1)  # R . T K
        return query, self.attend.keys(keys), values

    def queries(self, rows: Tensor) -> Tensor:
        return self.queries_keys_values(rows)[0]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries_keys_values(memory)[1:]


class JointCrossAttention(CrossAttention):
    """Cross-attention with one projection of the memory to keys and values."""

    def __init__(self, plain: CrossAttention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_width = plain.heads, plain.kv_heads, plain.head_width
        self.q_proj, self.out_proj, self.attend = plain.q_proj, plain.out_proj, plain.attend
        self.kv_proj = concatenate([plain.k_proj, plain.v_proj])  # type: ignore[list-item]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_proj(memory).unflatten(-1, (2 * self.kv_heads, -1)).transpose(1, 2)  # B 2G S K
        # Contiguous per source: they are computed once and read at every step.
        keys, values = (part.contiguous() for part in both.chunk(2, 1))
        return self.attend.keys(keys), values


@dataclass(frozen=True)
class BlockProgram:
    """One Transformer block: its layers and sizes."""

    qkv: nn.Module  # joint projection to queries, keys and values
    attention_out: nn.Module
    cross_query: nn.Module | None  # None: no cross-attention
    cross_out: nn.Module | None
    up: nn.Module
    gate: nn.Module | None
    down: nn.Module
    norms: tuple[LayerNorm, ...]  # of the sublayers, in order
    pre_norm: bool
    activation: str
    heads: int
    kv_heads: int
    head_width: int
    scale: float
    cross_scale: float

    @property
    def linears(self) -> list[nn.Module]:
        layers = (self.qkv, self.attention_out, self.cross_query, self.cross_out, self.up, self.gate, self.down)
        return [layer for layer in layers if layer is not None]


@dataclass(frozen=True)
class DecoderProgram:
    """The blocks of a decoder with the norms around them; entry and output are those of the decoder."""

    entry_norm: LayerNorm | None
    blocks: tuple[BlockProgram, ...]
    final_norm: LayerNorm | None

    @property
    def pre_norm(self) -> bool:
        return self.final_norm is not None


def lower_decoder(decoder: nn.Module) -> DecoderProgram | None:
    """The program of a decoder; None: it cannot be lowered."""
    if (
        type(decoder) is not TransformerDecoder
        or not decoder.has_kv_cache
        or not position_in_embedding(decoder.position)
        or decoder.global_every is not None
    ):
        return None
    norms = (decoder.embedding_norm, decoder.final_norm)
    blocks = tuple(program for layer in decoder.layers if (program := lower_block(layer)) is not None)
    if len(blocks) < len(decoder.layers) or not all(type(norm) is LayerNorm or norm is None for norm in norms):
        return None
    return DecoderProgram(decoder.embedding_norm, blocks, decoder.final_norm)  # type: ignore[arg-type]


def lower_block(layer: TransformerLayer) -> BlockProgram | None:
    """The program of a layer: softmax attention over dot products, joint projections, layer norms, plain layers."""
    attention, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
    if type(layer) is not TransformerLayer or not isinstance(attention, JointSelfAttention):
        return None
    if layer.norm_place not in ("pre", "post") or not isinstance(feed_forward, FeedForward):
        return None
    norms = [one.norm for one in layer.residuals]
    if not isinstance(cross, JointCrossAttention | None) or not all(type(norm) is LayerNorm for norm in norms):
        return None
    attentions: list[MultiHeadAttention] = [attention, *([] if cross is None else [cross])]
    if not all(one.attend.fused and type(one.attend.score).keys is AttentionScore.keys for one in attentions):
        return None
    program = BlockProgram(
        qkv=attention.qkv_proj,
        attention_out=attention.out_proj,
        cross_query=None if cross is None else cross.q_proj,
        cross_out=None if cross is None else cross.out_proj,
        up=feed_forward.fc1,
        gate=feed_forward.fc_gate,
        down=feed_forward.fc2,
        norms=tuple(norms),  # type: ignore[arg-type]
        pre_norm=layer.norm_place == "pre",
        activation=feed_forward.activation,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_width=attention.head_width,
        scale=attention.attend.score.scale or 1.0,
        cross_scale=1.0 if cross is None else cross.attend.score.scale or 1.0,
    )
    return program if all(is_plain(linear) for linear in program.linears) else None


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes W x + b and no more: no adapter hangs on it."""
    return isinstance(layer, PackedLinear) or (type(layer) is nn.Linear and not has_hooks(layer))


def has_embedding_tables(decoder: TransformerDecoder) -> bool:
    """Whether entry and output are table lookups and one linear layer, which a single kernel computes."""
    position, output = decoder.position, decoder.output
    known = type(position) in (Learned, NoPosition, Sinusoidal) and getattr(position, "concat_proj", None) is None
    known = known and type(decoder.embedding) is Embedding and type(output) is Output and output.is_linear
    return known and decoder.embedding_proj is None and is_plain(output.projection)


class StepBackend(Protocol):
    """Runs the step of a decoder program."""

    finds_top_k: bool  # True: `top_k` can be called
    supports_shortlists: bool  # True: `top_k` takes shortlists

    def supports(self, tokens: Tensor, state: State) -> bool:
        """Whether it runs the step of these rows (R 1) after `reserve`; else the modules do."""

    def advance(self, decoder: LoweredDecoder, tokens: Tensor, state: State) -> Step:
        """See `contracts.Decoder.advance`."""

    def top_k(self, decoder: LoweredDecoder, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        """See `contracts.TopKDecoder.top_k`."""


class LoweredDecoder(TransformerDecoder):
    """A Transformer decoder whose decoding steps run on a backend"""

    def __init__(self, plain: TransformerDecoder, backend: StepBackend) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: copy.copy(value) for name, value in vars(plain).items()})
        self.backend = backend

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        one_step = mask is None and not with_attention and "kv_cache" in state.fixed and tokens.size(1) == 1
        if one_step and self.backend.supports(tokens, state):
            return self.backend.advance(self, tokens, state)
        return super().advance(tokens, state, mask, with_attention=with_attention)


class TopKLoweredDecoder(LoweredDecoder):
    """A lowered decoder that finds the top k next tokens: see `contracts.TopKDecoder`"""

    @property
    def supports_shortlists(self) -> bool:
        return self.backend.supports_shortlists

    def top_k(self, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        return self.backend.top_k(self, tokens, state, request)


def with_backend(decoder: TransformerDecoder, backend: StepBackend) -> LoweredDecoder:
    return (TopKLoweredDecoder if backend.finds_top_k else LoweredDecoder)(decoder, backend)
