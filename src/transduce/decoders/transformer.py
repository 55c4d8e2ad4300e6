"""Transformer decoders: with cross-attention to the memory, or with the memory as a prefix of self-attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.attention.multihead import layers_and_heads
from transduce.attention.positions import embedded_only
from transduce.attention.self_attention import SelfAttention
from transduce.contracts import Decoder, SequenceContext
from transduce.errors import InputError
from transduce.flow import PAD, Attention, CacheSlots, Memory, PackedLayout, State, Step, Tree
from transduce.kernels.decode_step import empty_cache, memory_bias
from transduce.kernels.dispatch import to_matmul_dtype
from transduce.kernels.linear import linear
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import dense
from transduce.layers.norm import LayerNorm
from transduce.layers.option_groups import flat_options
from transduce.layers.transformer import ProjectedMemory, StackOptions, TransformerStack

ALIGNED = 16  # fused kernels need aligned mask rows


class TransformerDecoder(TransformerStack, Decoder):
    """layers of masked self-attention, cross-attention and feed-forward (Vaswani 2017)"""

    causal = True

    @flat_options
    def __init__(self, embedding: Embedding, output: Output, memory_width: int, *, stack: StackOptions) -> None:
        super().__init__(embedding, stack, memory_width)
        self.output = output

    @property
    def attention_shape(self) -> tuple[int, int]:
        return layers_and_heads([block.cross_attention for block in self.layers])

    def start(self, memory: Memory) -> State:
        values = to_matmul_dtype(memory.values)  # once for all layers
        projected = tuple(
            block.cross_attention.keys_values(values) for block in self.layers if block.cross_attention is not None
        )
        rows = memory.mask.size(0)
        past: dict[str, Tree] = {"layers": self.start_layers(rows)}
        if not self.has_kv_cache:  # no cache whose length gives the position
            past["next_position"] = torch.zeros(rows, dtype=torch.long, device=memory.mask.device)
        fixed: dict[str, Tree] = {"memory": projected, "mask": memory.mask}
        if memory.segment_ids is not None:
            fixed["segment_ids"] = memory.segment_ids
        return State(fixed, past)

    def pack(self, state: State, rows: PackedLayout) -> State:
        mask = rows.same_segment(rows.segment_ids).tril()
        windowed = mask if self.window is None else mask.triu(-self.window)
        packed = {"positions": rows.positions, "mask": windowed, "global_mask": mask}
        memory_mask = rows.same_segment(state.fixed["segment_ids"])[:, 0]
        return replace(state, fixed={**state.fixed, "mask": memory_mask, "packed": packed})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        preallocated = "kv_cache" in state.fixed  # by `reserve`
        context, past = self.slot_context(state) if preallocated else self._context(tokens, state, mask)
        # Training gives no mask, as right padding cannot reach a real row; only batch norm needs it.
        real = tokens != PAD if mask is None else mask
        context = replace(context, real=real, padded=mask is not None, with_attention=with_attention)
        values = self.embed(self.embedding(tokens), context.queries, context.real)
        memory = ProjectedMemory(state.fixed["memory"], state.fixed["mask"]) if state.fixed["memory"] else None
        caches = state.fixed["kv_cache"] if preallocated else state.past["layers"]
        output = self.run_layers(values, caches, context, memory)
        attention = Attention(output.cross_attention, output.self_attention) if with_attention else None
        state = replace(state, past=past if preallocated else {**past, "layers": output.past})
        return Step(self.output(output.values), state, attention, output.values)

    def reserve(self, state: State, more: int, beams: int) -> State:
        """Preallocated KV caches, with one slot per beam and position, stored per source: see `flow.CacheSlots`."""
        if not self.has_kv_cache:
            return state
        if "kv_cache" in state.fixed:
            return _enlarged(state, more)
        rows, before = state.past["layers"][0][0].shape[0:3:2]
        lengths = torch.full((rows,), before, device=state.fixed["mask"].device)
        order = None
        if "real" in state.past:
            lengths = state.past["real"].sum(1)
            order = (~state.past["real"]).to(torch.uint8).sort(dim=1, stable=True).indices  # real rows to the front
        capacity = -(-(before + more) // ALIGNED) * ALIGNED

        def widen(cache: Tensor) -> Tensor:  # B G U K -> B N L G K
            if order is not None:
                cache = cache.gather(2, order[:, None, :, None].expand_as(cache))
            wide = empty_cache((rows, beams, capacity, cache.size(1), cache.size(3)), cache)
            wide[:, 0, :before] = cache.transpose(1, 2)
            return wide

        layers = tuple(tuple(widen(part) for part in layer) for layer in state.past["layers"])
        indirection = torch.zeros(rows, capacity, dtype=torch.int16, device=lengths.device)
        fixed = {**state.fixed, "kv_cache": layers}
        if (bias := memory_bias(state.fixed["mask"])) is not None:
            fixed["additive_mask"] = bias
        return State(fixed, {"next_position": lengths, "indirection": indirection}, state.beams)

    def slot_context(self, state: State) -> tuple[SequenceContext, dict[str, Tensor]]:
        """Context of one new token per row in a preallocated cache, and the next state."""
        positions, indirection = state.past["next_position"], state.past["indirection"]  # R, R L
        rows, beams, capacity = len(positions), state.beams, indirection.size(1)
        if beams > 1:  # each new token is in the slot of its own beam
            beam = torch.arange(beams, dtype=indirection.dtype, device=positions.device)  # N
            indirection = indirection.scatter(1, positions[:, None], beam.repeat(rows // beams)[:, None])
        context = SequenceContext(
            self.position,
            positions[:, None],
            torch.arange(capacity, device=positions.device)[None],
            slots=CacheSlots(positions, indirection, beams, self.window),
            source=state.fixed.get("additive_mask"),
        )
        # A captured search checks for its end only now and then: steps after the end stay in the last slot.
        return context, {"next_position": (positions + 1).clamp(max=capacity - 1), "indirection": indirection}

    def _context(self, tokens: Tensor, state: State, mask: Tensor | None) -> tuple[SequenceContext, dict[str, Tensor]]:
        """Context of the new tokens, and the positions in the next state.

        Packed sequences use the masks of `pack`, and no step follows them. Without padding, positions are counts and
        are not stored. Once a mask was given, the state stores which cached rows are real, and their positions.
        """
        if "packed" in state.fixed:
            packed = state.fixed["packed"]
            positions, masks = packed["positions"], (packed["mask"], packed["global_mask"])
            return SequenceContext(self.position, positions, positions, masks[0], global_mask=masks[1]), {}
        rows, steps = tokens.shape
        new = torch.arange(steps, device=tokens.device)
        if not self.has_kv_cache:
            first = state.past["next_position"]
            queries = first[:, None] + new  # R T
            following = first + (steps if mask is None else mask.sum(1))
            return SequenceContext(self.position, queries, queries), {"next_position": following}
        before: int = state.past["layers"][0][0].size(2)
        if mask is None and "real" not in state.past:
            keys = torch.arange(before + steps, device=tokens.device)[None]  # 1 U
            queries = keys[:, before:]
            causal = bool(before == 0) and self.window is None  # a plain causal mask
            visible = None if causal or (steps == 1 and self.window is None) else self._visible(queries, keys)
            everywhere = None if visible is None else self._everywhere(visible, queries, keys)
            return SequenceContext(self.position, queries, keys, visible, causal, global_mask=everywhere), {}
        fresh = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        real = torch.cat((state.past.get("real", fresh.new_ones(rows, before)), fresh), 1)
        queries = real[:, :before].sum(1, keepdim=True) + new  # R T
        unpadded = torch.arange(before, device=tokens.device).expand(rows, -1)
        keys = torch.cat((state.past.get("positions", unpadded), queries), 1)  # R U
        visible = self._visible(queries, keys, real)
        everywhere = self._everywhere(visible, queries, keys, real)
        context = SequenceContext(self.position, queries, keys, visible, global_mask=everywhere)
        return context, {"real": real, "positions": keys}

    def _everywhere(self, visible: Tensor, queries: Tensor, keys: Tensor, real: Tensor | None = None) -> Tensor:
        """The mask of layers without the window that others have."""
        return visible if self.global_every is None else self._visible(queries, keys, real, windowed=False)

    def _visible(self, queries: Tensor, keys: Tensor, real: Tensor | None = None, *, windowed: bool = True) -> Tensor:
        """. 1 T U: a new token attends to itself and to earlier real tokens within the window."""
        steps, total = queries.size(1), keys.size(1)
        square = torch.ones(steps, total, dtype=torch.bool, device=queries.device)
        visible = square.tril(total - steps)[None]
        if real is not None:
            visible = visible & real[:, None]
        if windowed and self.window is not None:
            visible = visible & (queries[:, :, None] - keys[:, None] <= self.window)
        # Padded rows attend to themselves: the softmax of an empty row would be nan.
        itself = square.tril(total - steps) & square.triu(total - steps)
        return (visible | itself)[:, None]


def _enlarged(state: State, more: int) -> State:
    """The same state with `more` positions in every cache."""
    layers = tuple(tuple(F.pad(part, (0, 0, 0, 0, 0, more)) for part in layer) for layer in state.fixed["kv_cache"])
    past = {**state.past, "indirection": F.pad(state.past["indirection"], (0, more))}
    return State({**state.fixed, "kv_cache": layers}, past, state.beams)


class PrefixDecoder(TransformerDecoder):
    """masked self-attention over the tokens and, before them, norm(W m + b) of each row m of the memory (Wang 2022)

    The rows of the memory attend to each other, and not to tokens. They pass through the layers once per source; their
    keys and values are the fixed state. Positions are those of the tokens. Without a memory it is a language model.
    """

    @flat_options
    def __init__(self, embedding: Embedding, output: Output, memory_width: int, *, stack: StackOptions) -> None:
        TransformerStack.__init__(self, embedding, stack)
        self.output = output
        embedded_only(self.position, "the memory of a prefix decoder")
        if self.window is not None or type(self.layers[0].self_attention) is not SelfAttention:
            raise InputError(
                "a prefix decoder has self-attention over all earlier rows",
                remedy="leave window and token_mixer out, or choose the kind transformer",
            )
        self.memory_proj = dense(memory_width, self.width) if memory_width else None
        self.memory_norm = LayerNorm(self.width) if memory_width else None

    @property
    def supports_packing(self) -> bool:
        return False

    def start(self, memory: Memory) -> State:
        rows = memory.mask.size(0)
        fixed: dict[str, Tree] = {"memory": (), "mask": memory.mask}
        if self.memory_proj is not None and self.memory_norm is not None:
            values = self.memory_norm(linear(self.memory_proj, to_matmul_dtype(memory.values)))
            index = torch.arange(memory.mask.size(1), device=memory.mask.device)[None]
            context = SequenceContext(
                self.position, index, index, memory.mask[:, None, None], real=memory.mask, padded=True
            )
            fixed["memory"] = self.run_layers(self.dropout(values), self.start_layers(rows), context).past
        return State(fixed, {"layers": self.start_layers(rows)})

    def slot_context(self, state: State) -> tuple[SequenceContext, dict[str, Tensor]]:
        context, past = super().slot_context(state)
        return replace(context, mask=state.fixed["mask"][:, None, None]), past

    def _context(self, tokens: Tensor, state: State, mask: Tensor | None) -> tuple[SequenceContext, dict[str, Tensor]]:
        """With the columns of the memory before those of the tokens in the mask."""
        context, past = super()._context(tokens, state, mask)
        if not state.fixed["memory"]:
            return context, past
        visible = self._visible(context.queries, context.keys) if context.mask is None else context.mask  # . 1 T U
        rows, steps = tokens.shape
        before = state.fixed["mask"].repeat_interleave(rows // len(state.fixed["mask"]), 0)  # R S
        both = (before[:, None, None].expand(-1, -1, steps, -1), visible.expand(rows, -1, -1, -1))
        return replace(context, mask=torch.cat(both, -1), causal=False), past
