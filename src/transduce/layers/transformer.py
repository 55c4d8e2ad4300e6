"""Rows in, rows out, through a stack of blocks: what a Transformer's encoder and decoder have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transduce.attention.multihead import CrossAttention, Heads, Projections
from transduce.attention.normalisers import Softmax
from transduce.attention.positions import Sinusoidal, embedded_only, free_of_heads
from transduce.attention.scores import ScaledDot
from transduce.attention.self_attention import (
    SSRU,
    AverageAttention,
    SelfAttention,
    SequenceContext,
    TokenMixer,
    TokenMixerKind,
)
from transduce.contracts import AttentionScore, Count, FrontEnd, Normaliser, PositionEncoding, Rate
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.add_norm import NormPair, ResidualStream, norm_stream
from transduce.layers.dropout import Dropout
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Activation, FeedForward
from transduce.layers.norm import NORMALISATIONS, Normalisation, NormPlacement, Residual

KeysValues = tuple[Tensor, Tensor]  # each B G S K


@dataclass(frozen=True)
class ProjectedMemory:
    """A memory as every block reads it: keys and values for each, and which rows are real."""

    projected: tuple[KeysValues, ...]
    mask: Tensor  # B S, or B T S: to each of the rows that read it


@dataclass(frozen=True)
class StackOutput:
    """What comes out of a stack of blocks."""

    values: Tensor  # R T D
    past: tuple[Tree, ...]  # one a block
    self_attention: Tensor | None  # R L H T U, when asked for
    cross_attention: Tensor | None  # R L H T S


class TransformerStack(nn.Module):
    """The options of a Transformer, stated once, and its stack. Encoder and decoder inherit both."""

    causal: bool
    layers: Sequence[TransformerLayer]
    gradient_checkpointing: bool = (
        False  # True: training keeps what enters a block, and computes what is in it again for gradients
    )

    def __init__(
        self,
        embedding: FrontEnd,
        output: Output | None = None,
        memory_width: int = 0,  # 0: there is no memory to read
        *,
        layers: Count = 3,
        width: Count = 256,
        heads: Count = 4,
        head_width: Count | None = None,
        kv_heads: Count | None = None,
        ff_width: Count = 1024,
        activation: Activation = "relu",
        gated: bool = False,
        norm: NormPlacement = "pre",
        norm_kind: Normalisation = "layer",
        norm_eps: Annotated[float, Gt(0)] | None = None,
        embedding_norm: bool = False,
        bias: bool = True,
        position: type[PositionEncoding] = Sinusoidal,
        token_mixer: TokenMixerKind = "attention",
        window: Count | None = None,
        projections: Projections = "all",
        score: type[AttentionScore] = ScaledDot,
        normaliser: type[Normaliser] = Softmax,
        dropout: Rate = 0.1,
        attention_dropout: Rate = 0.0,
        activation_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.window = width, window
        self.has_kv_cache = token_mixer == "attention"  # else the past of a block does not grow
        self.embedding, self.dropout = embedding, Dropout(dropout)
        if output is not None:
            self.output = output
        self.position = position(width, heads, self.causal)
        if token_mixer != "attention":
            embedded_only(self.position, f"token_mixer: {token_mixer}")
            if window is not None:
                raise InputError(
                    f"token_mixer: {token_mixer} has no window",
                    remedy="leave window out, or set token_mixer: attention",
                )
        if head_width not in (None, width // heads):
            free_of_heads(self.position, head_width)
        shape = Heads(heads, kv_heads or heads, score, normaliser, projections, bias, attention_dropout, head_width)

        def levelled() -> nn.Module:
            return NORMALISATIONS[norm_kind](width, bias, **({} if norm_eps is None else {"eps": norm_eps}))

        def think() -> FeedForward:
            return FeedForward(width, ff_width, activation, activation_dropout, gated=gated, bias=bias)

        def look() -> TokenMixer:
            if token_mixer == "ssru":
                return SSRU(width)
            return (
                SelfAttention(width, width, shape)
                if token_mixer == "attention"
                else AverageAttention(width, think(), bias)
            )

        self.layers = nn.ModuleList(  # type: ignore[assignment]
            TransformerLayer(
                look(),
                CrossAttention(width, memory_width, shape) if memory_width else None,
                think(),
                [levelled() for _ in range(3 if memory_width else 2)],
                norm,
                dropout,
            )
            for _ in range(layers)
        )
        self.final_norm = levelled() if norm == "pre" else None
        self.embedding_norm = (
            levelled() if embedding_norm else None
        )  # over embedding and position together (Devlin 2019)

    @property
    def supports_packing(self) -> bool:
        """Whether several sequences may share a row: each sees its own tokens alone."""
        return self.has_kv_cache and isinstance(self.embedding, Embedding) and self.embedding.source_eos

    def embed(self, embedded: Tensor, places: Tensor, real: Tensor | None) -> Tensor:
        """What the first block reads of vectors (R T D) at these places."""
        values = self.position.add(embedded, places)
        result: Tensor = self.dropout(
            values if self.embedding_norm is None else self.embedding_norm(values, real).to(values)
        )
        return result

    def start_layers(self, rows: int) -> tuple[Tree, ...]:
        """The past of every block before the first row."""
        return tuple(block.self_attention.start(rows, self._like) for block in self.layers)

    @property
    def _like(self) -> Tensor:
        """Any of its numbers: what is made anew has their kind and lies where they do."""
        return next(self.parameters())

    def run_layers(
        self,
        values: ResidualStream,
        past: tuple[Tree, ...],
        view: SequenceContext,
        memory: ProjectedMemory | None = None,
    ) -> StackOutput:
        after: list[Tree] = []
        own: list[Tensor] = []
        cross: list[Tensor] = []
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for number, block in enumerate(self.layers):
            source = None if memory is None else (memory.projected[number], memory.mask)
            # Under the same random numbers the second time: what dropout left out is left out again.
            run = partial(checkpoint, block.run, use_reentrant=False) if again else block.run
            values, now, seen, found = run(values, past[number], view, source)
            after.append(now)
            own += [seen] if seen is not None else []
            cross += [found] if found is not None else []
        if self.final_norm is not None:
            values = norm_stream(self.final_norm, values, view.real)[1]
        values = values.x if isinstance(values, NormPair) else values
        assert isinstance(values, Tensor)
        return StackOutput(
            values, tuple(after), torch.stack(own, 1) if own else None, torch.stack(cross, 1) if cross else None
        )


class TransformerLayer(nn.Module):
    """look back at the own sequence, look up in the memory where there is one, think"""

    def __init__(
        self,
        own: TokenMixer,
        cross: CrossAttention | None,
        feed_forward: FeedForward,
        norms: Sequence[nn.Module],  # one for each of the above
        norm_place: NormPlacement,
        dropout: float,
    ) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = own, cross, feed_forward
        self.self_attention_norm = norms[0]
        self.cross_attention_norm = None if cross is None else norms[1]
        self.feed_forward_norm = norms[-1]
        self.norm_place, self.dropout = norm_place, Dropout(dropout)

    @property
    def residuals(self) -> list[Residual]:
        """The residual connection around each sub-layer, in the order in which they run."""
        norms = (self.self_attention_norm, self.cross_attention_norm, self.feed_forward_norm)
        return [self._residual(norm) for norm in norms if norm is not None]

    def _residual(self, norm: nn.Module) -> Residual:
        return Residual(norm, self.norm_place, self.dropout)

    def run(
        self, values: ResidualStream, past: Tree, view: SequenceContext, source: tuple[KeysValues, Tensor] | None
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        """Rows in; rows, the past after them, and what was looked at in it and in the memory, out."""
        found = None
        values, past, seen = self.apply_self_attention(values, past, view)
        if source is not None:
            values, found = self.apply_cross_attention(values, *source, view)
        return self.apply_feed_forward(values, view), past, seen, found

    def apply_self_attention(
        self, values: ResidualStream, past: Tree, view: SequenceContext
    ) -> tuple[ResidualStream, Tree, Tensor | None]:
        residual = self._residual(self.self_attention_norm)
        values, rows = residual.enter(values, view.real)
        found, past, weights = self.self_attention(rows, past, view)
        return residual.leave(values, found, view.real), past, weights

    def apply_cross_attention(
        self, values: ResidualStream, memory: KeysValues, mask: Tensor, view: SequenceContext
    ) -> tuple[ResidualStream, Tensor | None]:
        assert self.cross_attention is not None
        assert self.cross_attention_norm is not None
        residual = self._residual(self.cross_attention_norm)
        values, rows = residual.enter(values, view.real)
        found, weights = self.cross_attention(rows, *memory, mask, with_attention=view.with_attention)
        return residual.leave(values, found, view.real), weights

    def apply_feed_forward(self, values: ResidualStream, view: SequenceContext) -> ResidualStream:
        residual = self._residual(self.feed_forward_norm)
        values, rows = residual.enter(values, view.real)
        return residual.leave(values, self.feed_forward(rows), view.real)


def recompute(model: nn.Module) -> bool:
    """Every stack of blocks in it does so from now on (Chen 2016); False: there is none."""
    stacks = [part for part in model.modules() if isinstance(part, TransformerStack)]
    for stack in stacks:
        stack.gradient_checkpointing = True
    return bool(stacks)
