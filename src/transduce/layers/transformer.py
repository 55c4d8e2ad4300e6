"""Transformer layer and stack, shared by encoder and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transduce.attention.multihead import CrossAttention
from transduce.attention.positions import AdditivePosition, LayerPositions, Sinusoidal, embedded_only
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import Count, FrontEnd, PositionEncoding, Rate, SequenceContext, TokenMixer
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.add_norm import NormPair, ResidualStream, norm_stream
from transduce.kernels.linear import linear
from transduce.layers.embedding import Embedding
from transduce.layers.feed_forward import Dropout, FeedForward, MixtureOfExperts, dense
from transduce.layers.norm import NoNorm, NormPlacement, Residual
from transduce.layers.option_groups import NormOptions, SublayerOptions

KeysValues = tuple[Tensor, Tensor]  # each B G S K


@dataclass(frozen=True)
class ProjectedMemory:
    """Keys and values of a memory for each layer, and its mask."""

    projected: tuple[KeysValues, ...]
    mask: Tensor  # B S, or B T S: for each target row


@dataclass(frozen=True)
class StackOutput:
    """The output of a stack."""

    values: Tensor  # R T D
    past: tuple[Tree, ...]  # one per layer
    self_attention: Tensor | None  # R L H T U, where requested
    cross_attention: Tensor | None  # R L H T S


@dataclass(frozen=True)
class SequenceOptions:
    """Embeddings, positions, token mixer and window of the layers."""

    embedding_width: Count | None = None  # of embeddings, which a linear layer follows (Lan 2020); None: no such layer

    position: type[PositionEncoding] = Sinusoidal
    position_per_layer: bool = False  # True: weights of its own for each layer
    token_mixer: type[TokenMixer] = SelfAttention
    window: Count | None = None  # rows attend to rows at most this far away; None: to all
    global_every: Count | None = None  # every nth layer has no window (Warner 2024); None: all have
    global_first: Annotated[int, Ge(0)] = 0  # the first layer that has none
    local_position: type[PositionEncoding] | None = None  # of layers with a window; None: the same as of the others


@dataclass(frozen=True)
class StackOptions:
    """The options that encoder and decoder have in common."""

    layers: Count = 3
    tie_layers: bool = False  # True: all layers have the weights of the first (Dehghani 2019, Lan 2020)
    width: Count = 256
    sublayers: SublayerOptions = field(default_factory=SublayerOptions)
    norm: NormOptions = field(default_factory=NormOptions)
    sequence: SequenceOptions = field(default_factory=SequenceOptions)
    dropout: Rate = 0.1


class TransformerStack(nn.Module):
    """A stack of Transformer layers; encoder and decoder inherit it."""

    causal: bool
    layers: Sequence[TransformerLayer]
    gradient_checkpointing: bool = False  # True: activations are recomputed in the backward pass

    def __init__(
        self,
        embedding: FrontEnd,
        options: StackOptions,
        memory_width: int = 0,  # 0: no memory to attend to
    ) -> None:
        super().__init__()
        width, sublayers, norm, sequence = options.width, options.sublayers, options.norm, options.sequence
        attention, bias = sublayers.attention, sublayers.bias
        self.width, self.window = width, sequence.window
        self.global_every, self.global_first = sequence.global_every, sequence.global_first
        self.embedding, self.dropout = embedding, Dropout(options.dropout)
        embedded = sequence.embedding_width or width
        self.embedding_proj = None if sequence.embedding_width is None else dense(embedded, width)
        number = options.layers if sequence.position_per_layer else 1
        columns = width if attention.head_width is None else attention.head_width * attention.heads
        positions = [sequence.position(columns, attention.heads, self.causal) for _ in range(number)]
        if embedded != columns and isinstance(positions[0], AdditivePosition):
            positions = [sequence.position(embedded, attention.heads, self.causal)]
        self.position = LayerPositions(positions) if sequence.position_per_layer else positions[0]
        self.local_position = self._local_position(sequence, columns, attention.heads)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            TransformerLayer(
                sequence.token_mixer(width, sublayers),
                CrossAttention(width, memory_width, attention, bias) if memory_width else None,
                sublayers.feed_forward.make_layer(layer, width, bias),
                [norm.make(width, bias) for _ in range((3 if memory_width else 2) * (1 + (norm.norm == "sandwich")))],
                norm.norm,
                options.dropout,
            )
            for layer in range(options.layers)
        )
        self.has_kv_cache = self.layers[0].self_attention.has_kv_cache
        _check_token_mixer(self.layers[0].self_attention, self.position, self.window)
        if not norm.first_norm:
            if norm.norm != "pre":
                raise InputError("first_norm: false needs a pre-norm stack", remedy="set norm: pre")
            self.layers[0].self_attention_norm = NoNorm()
        if options.tie_layers:
            _tie_layers(self.layers)
        self.final_norm = None if norm.norm == "post" else norm.make(width, bias)
        self.embedding_norm = norm.make(embedded, bias) if norm.embedding_norm else None

    def _local_position(self, sequence: SequenceOptions, width: int, heads: int) -> PositionEncoding | None:
        """The encoding of layers with a window, where other layers have none."""
        if sequence.global_every is not None and sequence.window is None:
            raise InputError("global_every is for layers with a window", remedy="leave it out, or set window")
        if sequence.local_position is None:
            return None
        made = sequence.local_position(width, heads, self.causal)
        unfit = self.causal or sequence.global_every is None
        if unfit or type(made).add is not PositionEncoding.add:
            raise InputError(
                "local_position acts in the attention of encoder layers with a window, beside layers without one",
                remedy="set global_every, and choose rotary, relative, shaw or alibi",
            )
        return made

    def _is_global(self, number: int) -> bool:
        """Whether a layer has no window, though others have."""
        every, first = self.global_every, self.global_first
        return every is not None and number >= first and (number - first) % every == 0

    @property
    def supports_packing(self) -> bool:
        """Whether several sequences may be packed into one row, each attending to its own tokens."""
        return self.has_kv_cache and isinstance(self.embedding, Embedding) and self.embedding.source_eos

    def embed(self, embedded: Tensor, positions: Tensor, real: Tensor | None) -> Tensor:
        """The input of the first layer: embeddings (R T E) with positions, norm and dropout, as wide as the model."""
        values = self.position.add(embedded, positions)
        values = self.dropout(values if self.embedding_norm is None else self.embedding_norm(values, real).to(values))
        return values if self.embedding_proj is None else linear(self.embedding_proj, values)

    def start_layers(self, rows: int) -> tuple[Tree, ...]:
        """The state of every layer before the first row."""
        return tuple(block.self_attention.start(rows, self._reference_parameter) for block in self.layers)

    @property
    def _reference_parameter(self) -> Tensor:
        """A parameter that gives dtype and device of new tensors."""
        return next(self.parameters())

    def _layer_context(self, number: int, sequence: SequenceContext) -> SequenceContext:
        """The context with the position encoding and the mask of one layer."""
        everywhere = self._is_global(number)
        position = self.position.of_layer(number)
        if self.local_position is not None and not everywhere:
            position = self.local_position
        if position is sequence.position and not everywhere:
            return sequence
        if not everywhere:
            return replace(sequence, position=position)
        slots = None if sequence.slots is None else sequence.slots.without_window
        return replace(sequence, position=position, mask=sequence.global_mask, slots=slots)

    def run_layers(
        self,
        values: ResidualStream,
        past: tuple[Tree, ...],
        sequence: SequenceContext,
        memory: ProjectedMemory | None = None,
    ) -> StackOutput:
        next_past: list[Tree] = []
        self_weights: list[Tensor] = []
        cross_weights: list[Tensor] = []
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers):
            source = None if memory is None else (memory.projected[number], memory.mask)
            # The recomputation restores the random state, so that dropout is the same.
            run = partial(checkpoint, layer.run, use_reentrant=False) if recompute else layer.run
            context = self._layer_context(number, sequence)
            values, layer_past, self_attention, cross_attention = run(values, past[number], context, source)
            next_past.append(layer_past)
            self_weights += [] if self_attention is None else [self_attention]
            cross_weights += [] if cross_attention is None else [cross_attention]
        if self.final_norm is not None:
            values = norm_stream(self.final_norm, values, sequence.real)[1]
        values = values.x if isinstance(values, NormPair) else values
        assert isinstance(values, Tensor)
        return StackOutput(
            values,
            tuple(next_past),
            torch.stack(self_weights, 1) if self_weights else None,
            torch.stack(cross_weights, 1) if cross_weights else None,
        )


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention where there is a memory, and feed-forward, each with a residual connection."""

    def __init__(
        self,
        self_attention: TokenMixer,
        cross_attention: CrossAttention | None,
        feed_forward: FeedForward | MixtureOfExperts,
        norms: Sequence[nn.Module],  # one for each of the above; of a sandwich, the same number again
        norm_place: NormPlacement,
        dropout: float,
    ) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = self_attention, cross_attention, feed_forward
        number = 2 if cross_attention is None else 3
        before: Sequence[nn.Module] = norms[:number]
        after: Sequence[nn.Module | None] = norms[number:] or [None] * number
        self.self_attention_norm, self.self_attention_output_norm = before[0], after[0]
        self.cross_attention_norm, self.cross_attention_output_norm = None, None
        if cross_attention is not None:
            self.cross_attention_norm, self.cross_attention_output_norm = before[1], after[1]
        self.feed_forward_norm, self.feed_forward_output_norm = before[-1], after[-1]
        self.norm_place, self.dropout = norm_place, Dropout(dropout)

    @property
    def residuals(self) -> list[Residual]:
        """The residual connection around each sub-layer, in the order in which they run."""
        norms = (
            (self.self_attention_norm, self.self_attention_output_norm),
            (self.cross_attention_norm, self.cross_attention_output_norm),
            (self.feed_forward_norm, self.feed_forward_output_norm),
        )
        return [Residual(norm, self.norm_place, self.dropout, after) for norm, after in norms if norm is not None]

    def run(
        self, values: ResidualStream, past: Tree, sequence: SequenceContext, source: tuple[KeysValues, Tensor] | None
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        """The next residual stream, the next state, and the self- and cross-attention weights.

        Without cross-attention the memory is a prefix of the rows.
        """
        if source is not None and self.cross_attention is None:
            sequence, source = replace(sequence, prefix=source[0]), None
        if self.norm_place == "parallel":
            return self._run_parallel(values, past, sequence, source)
        cross_weights = None
        values, past, self_weights = self.apply_self_attention(values, past, sequence)
        if source is not None:
            values, cross_weights = self.apply_cross_attention(values, *source, sequence)
        return self.apply_feed_forward(values, sequence), past, self_weights, cross_weights

    def _run_parallel(
        self, values: ResidualStream, past: Tree, sequence: SequenceContext, source: tuple[KeysValues, Tensor] | None
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        """As `run`, with sub-layers that all have the input of the layer."""
        total, rows = self.residuals[0].enter(values, sequence.real)
        cross_weights, inputs = None, total
        change, past, self_weights = self.self_attention(rows, past, sequence)
        total = total + self.dropout(change)
        if source is not None:
            assert self.cross_attention is not None
            assert self.cross_attention_norm is not None
            rows, (memory, mask) = self.cross_attention_norm(inputs, sequence.real), source
            change, cross_weights = self.cross_attention(rows, *memory, mask, with_attention=sequence.with_attention)
            total = total + self.dropout(change)
        change = self.feed_forward(self.feed_forward_norm(inputs, sequence.real))
        return total + self.dropout(change), past, self_weights, cross_weights

    def apply_self_attention(
        self, values: ResidualStream, past: Tree, sequence: SequenceContext
    ) -> tuple[ResidualStream, Tree, Tensor | None]:
        residual = self.residuals[0]
        values, rows = residual.enter(values, sequence.real)
        change, past, weights = self.self_attention(rows, past, sequence)
        return residual.leave(values, change, sequence.real), past, weights

    def apply_cross_attention(
        self, values: ResidualStream, memory: KeysValues, mask: Tensor, sequence: SequenceContext
    ) -> tuple[ResidualStream, Tensor | None]:
        assert self.cross_attention is not None
        residual = self.residuals[1]
        values, rows = residual.enter(values, sequence.real)
        change, weights = self.cross_attention(rows, *memory, mask, with_attention=sequence.with_attention)
        return residual.leave(values, change, sequence.real), weights

    def apply_feed_forward(self, values: ResidualStream, sequence: SequenceContext) -> ResidualStream:
        residual = self.residuals[-1]
        values, rows = residual.enter(values, sequence.real)
        return residual.leave(values, self.feed_forward(rows), sequence.real)


def _tie_layers(layers: Sequence[TransformerLayer]) -> None:
    """Makes all layers use the parameters of the first."""
    first = dict(layers[0].named_parameters())
    for layer in layers[1:]:
        if [*dict(layer.named_parameters())] != [*first]:
            raise InputError("tie_layers needs equal layers", remedy="leave out experts_every and first_norm: false")
        for name, parameter in first.items():
            module, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(module), leaf, parameter)


def _check_token_mixer(mixer: TokenMixer, position: PositionEncoding, window: int | None) -> None:
    """Window and positions that act in self-attention need a token mixer with a cache of keys and values."""
    if mixer.has_kv_cache:
        return
    name = f"the token mixer {type(mixer).__name__}"
    embedded_only(position, name)
    if window is not None:
        raise InputError(f"{name} has no window", remedy="leave window out, or set token_mixer: attention")


def enable_gradient_checkpointing(model: nn.Module) -> bool:
    """Enables gradient checkpointing in every stack of a model (Chen 2016); False: it has none."""
    stacks = [part for part in model.modules() if isinstance(part, TransformerStack)]
    for stack in stacks:
        stack.gradient_checkpointing = True
    return bool(stacks)
