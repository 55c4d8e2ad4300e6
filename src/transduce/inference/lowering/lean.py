"""A block with packed matrices in, the same block out, which reads the new row of a search in as few calls as can be.

A step of a small model is mostly calls: each of a module's costs a microsecond before it does anything. So what a block
needs is looked up once, when it is made. Where our own kernels are, a step is one call of theirs; elsewhere it is a
straight line of torch's operations. Everything but a step of a search goes the way it always went.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.multihead import MultiHeadAttention
from transduce.attention.self_attention import SelfAttention, SequenceContext, shade
from transduce.contracts import AttentionScore, PositionEncoding
from transduce.flow import Tree
from transduce.inference.lowering.joint_projections import JointMemory, JointSelf
from transduce.kernels.add_norm import ResidualStream
from transduce.kernels.linear import ACTIVATIONS
from transduce.kernels.native.block_step import ACTIVATIONS as NATIVE_ACTIVATIONS
from transduce.kernels.native.block_step import BlockLayers, NativeBlock
from transduce.kernels.native.library import library
from transduce.kernels.packed_linear import LinearFunction, PackedLinear
from transduce.layers.feed_forward import FeedForward
from transduce.layers.norm import LayerNorm, Residual
from transduce.layers.transformer import KeysValues, TransformerLayer, TransformerStack

Join = Callable[[Tensor, Tensor], Tensor]


class LeanBlock(TransformerLayer):
    """look back, look up and think, each row of a search at the least cost"""

    def __init__(self, plain: TransformerLayer) -> None:
        nn.Module.__init__(self)
        self.self_attention, self.cross_attention, self.feed_forward = (
            plain.self_attention,
            plain.cross_attention,
            plain.feed_forward,
        )
        self.self_attention_norm, self.cross_attention_norm = plain.self_attention_norm, plain.cross_attention_norm
        self.feed_forward_norm = plain.feed_forward_norm
        self.norm_place, self.dropout = plain.norm_place, plain.dropout
        around = [_around(residual) for residual in plain.residuals]
        # Plain functions and numbers: a module would look each of them up among its parts at every step.
        self.enters, self.leaves = [enter for enter, _ in around], [leave for _, leave in around]
        self.thinks = _thinking(plain.feed_forward)
        attention = plain.self_attention
        assert isinstance(attention, JointSelf)
        width = attention.head_width
        self.every, self.result = _direct(attention.all), _direct(attention.out_proj)
        self.scale = attention.attend.score.scale
        self.parts = [number * width for number in (attention.heads, attention.kv_heads, attention.kv_heads)]
        self.shape = (attention.heads, width)
        if isinstance(plain.cross_attention, JointMemory):
            self.asks, self.answers = _direct(plain.cross_attention.q_proj), _direct(plain.cross_attention.out_proj)
        self.whole = _whole(plain, attention)

    def run(
        self, values: ResidualStream, past: Tree, view: SequenceContext, source: tuple[KeysValues, Tensor] | None
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        slots = view.slots
        plain = view.with_attention or not isinstance(values, Tensor)
        if self.whole is None or slots is None or plain or past[0].dtype != torch.float32:
            return super().run(values, past, view, source)
        memory = None
        if source is not None:
            if view.source is None or not source[0][0].is_contiguous() or not source[0][1].is_contiguous():
                return super().run(values, past, view, source)
            memory = (*source[0], view.source)
        assert isinstance(values, Tensor)
        made = self.whole(values, past, slots.places, slots.owners, slots.beams, slots.reach, memory)
        return made, past, None, None

    def apply_self_attention(
        self, values: ResidualStream, past: Tree, view: SequenceContext
    ) -> tuple[ResidualStream, Tree, Tensor | None]:
        if view.slots is None or view.with_attention or not isinstance(values, Tensor):
            return super().apply_self_attention(values, past, view)
        rows, beams = len(values), view.slots.beams
        query, keys, added = self.every(self.enters[0](values)).view(rows, -1).split(self.parts, 1)  # R H*K, R G*K
        before, kept = past  # B N L G K
        slots, size = view.slots.rows, keys.size(1)
        before.view(-1, size).index_copy_(0, slots, keys)
        kept.view(-1, size).index_copy_(0, slots, added)
        context = F.scaled_dot_product_attention(
            query.view(-1, beams, *self.shape).transpose(1, 2),  # B H N K
            before.flatten(1, 2).transpose(1, 2),  # B H N*L K
            kept.flatten(1, 2).transpose(1, 2),
            attn_mask=view.slots.shade,
            scale=self.scale,
        )
        return self.leaves[0](values, self.result(context.transpose(1, 2).reshape(rows, 1, -1))), past, None

    def apply_cross_attention(
        self, values: ResidualStream, memory: KeysValues, mask: Tensor, view: SequenceContext
    ) -> tuple[ResidualStream, Tensor | None]:
        if view.slots is None or view.source is None or view.with_attention or not isinstance(values, Tensor):
            return super().apply_cross_attention(values, memory, mask, view)
        keys, kept = memory  # B H S K
        query = self.asks(self.enters[1](values)).view(len(keys), -1, *self.shape).transpose(1, 2)  # B H N K
        assert self.scale is not None
        if len(keys) > 1:
            context = _attend_sources(query, keys, kept, view.source, self.scale)
        else:
            context = F.scaled_dot_product_attention(query, keys, kept, attn_mask=view.source, scale=self.scale)
        return self.leaves[1](values, self.answers(context.transpose(1, 2).reshape(len(values), 1, -1))), None

    def apply_feed_forward(self, values: ResidualStream, view: SequenceContext) -> ResidualStream:
        if not isinstance(values, Tensor):
            return super().apply_feed_forward(values, view)
        return self.leaves[-1](values, self.thinks(self.enters[-1](values)))


class LeanReading(LeanBlock):
    """look at all of the own source and think, all rows of a block by one call of our kernels"""

    def run(
        self, values: ResidualStream, past: Tree, view: SequenceContext, source: tuple[KeysValues, Tensor] | None
    ) -> tuple[ResidualStream, Tree, Tensor | None, Tensor | None]:
        mask = view.mask  # B 1 1 S
        plain = self.whole is None or mask is None or view.with_attention
        if plain or not isinstance(values, Tensor) or values.dtype != torch.float32:
            return super().run(values, past, view, source)
        assert self.whole is not None
        assert mask is not None
        return self.whole.encode(values, shade(mask[:, 0, 0])), past, None, None


def _attend_sources(query: Tensor, keys: Tensor, values: Tensor, shade: Tensor, scale: float) -> Tensor:
    """softmax(scale q k + shade) v for the few queries of many sources, by plain products: B H N K.

    The fused kernel sets out anew for each source and head: 32 sources of 32 tokens take it 402 microseconds, this 202.
    """
    sources, heads, rows, width = query.shape
    flat, flat_values = (part.reshape(sources * heads, -1, width) for part in (keys, values))
    scores = torch.bmm(query.reshape(sources * heads, rows, width), flat.transpose(1, 2)).mul_(scale)
    weights = scores.view(sources, heads, rows, -1).add_(shade).softmax(-1)
    return torch.bmm(weights.flatten(0, 1), flat_values).view(query.shape)


def _whole(plain: TransformerLayer, own: JointSelf) -> NativeBlock | None:
    """All of a block as one call, where our own kernels read its matrices and know its activation."""
    think, cross = plain.feed_forward, plain.cross_attention
    activation = think.activation
    matrices = [own.all, own.out_proj, think.fc1, think.fc2, *([] if think.fc_gate is None else [think.fc_gate])]
    matrices += [cross.q_proj, cross.out_proj] if cross is not None else []
    norms: list[Any] = [(one.norm.weight, one.norm.bias, one.norm.eps) for one in plain.residuals]
    exact = all(one is None or one.dtype == torch.float32 for weight, bias, _ in norms for one in (weight, bias))
    if activation not in NATIVE_ACTIVATIONS or not exact or not all(_native(one) for one in matrices):
        return None
    assert own.attend.score.scale is not None
    return NativeBlock(
        BlockLayers(
            self_attention=(_native(own.all), _native(own.out_proj)),
            cross_attention=None if cross is None else (_native(cross.q_proj), _native(cross.out_proj)),
            feed_forward=(
                _native(think.fc1),
                None if think.fc_gate is None else _native(think.fc_gate),
                _native(think.fc2),
            ),
            norms=norms,
            pre_norm=plain.residuals[0].place == "pre",
            heads=own.heads,
            head_width=own.all.out_features // (3 * own.heads),
            activation=activation,
            scale=own.attend.score.scale,
            memory_scale=1.0 if cross is None else cross.attend.score.scale or 1.0,
        )
    )


def _native(part: nn.Module | None) -> Any:
    return getattr(part, "native", None)


def _around(residual: Residual) -> tuple[LinearFunction, Join]:
    """What a layer reads of a value, and what goes on: see `Residual`. The layer's own result is written over."""
    norm = residual.norm
    assert isinstance(norm, LayerNorm)
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps

    def scaled(values: Tensor) -> Tensor:
        return torch.layer_norm(values, shape, weight, bias, eps)

    if residual.place == "pre":
        return scaled, lambda values, change: change.add_(values)
    return lambda values: values, lambda values, change: scaled(change.add_(values))


def _thinking(part: FeedForward) -> LinearFunction:
    shrink = _direct(part.fc2)
    if part.fc_gate is None and part.activation == "relu":
        rectified = _direct(part.fc1, rectified=True)
        return lambda values: shrink(rectified(values))
    grow, activate = _direct(part.fc1), ACTIVATIONS[part.activation]
    if part.fc_gate is None:
        return lambda values: shrink(activate(grow(values)))
    gate = _direct(part.fc_gate)
    return lambda values: shrink(activate(grow(values)).mul_(gate(values)))


def _direct(part: nn.Module, *, rectified: bool = False) -> LinearFunction:
    assert isinstance(part, PackedLinear)
    return part.function(relu=rectified)


def lean(network: nn.Module) -> None:
    """Every block that can be is replaced by its lean one."""
    for stack in list(network.modules()):
        if (
            isinstance(stack, TransformerStack)
            and _speaks_first(stack.position)
            and (stack.causal or _reads_whole(stack))
        ):
            for number, block in enumerate(stack.layers):
                if _fits(block):
                    stack.layers[number] = (LeanBlock if stack.causal else LeanReading)(block)  # type: ignore[index]


def _reads_whole(stack: TransformerStack) -> bool:
    """Whether rows see all of their source, and our own kernels are there to read it."""
    return stack.window is None and library() is not None


def _speaks_first(position: PositionEncoding) -> bool:
    """Whether positions are all in the embeddings, so that attention needs to know nothing of them."""
    return type(position).rotate is PositionEncoding.rotate and type(position).bias is PositionEncoding.bias


def _fits(block: TransformerLayer) -> bool:
    """The common kind: identity softmax attention with a head of keys for every head, and each row its own norm."""
    if type(block) is not TransformerLayer or not all(isinstance(one.norm, LayerNorm) for one in block.residuals):
        return False
    looks: list[MultiHeadAttention] = [block.self_attention] if isinstance(block.self_attention, SelfAttention) else []
    looks += [block.cross_attention] if block.cross_attention is not None else []
    joint = isinstance(block.self_attention, SelfAttention) and all(
        isinstance(one, JointSelf | JointMemory) for one in looks
    )
    return joint and all(
        one.attend.fused and type(one.attend.score).keys is AttentionScore.keys and one.heads == one.kv_heads
        for one in looks
    )
