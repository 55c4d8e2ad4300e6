"""Transformer decoder: masked self-attention, cross-attention, feed-forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.attention.multihead import layers_and_heads
from transduce.contracts import Decoder, SequenceContext
from transduce.flow import PAD, Attention, CacheSlots, Memory, PackedLayout, State, Step, Tree, additive_mask
from transduce.kernels.dispatch import to_matmul_dtype
from transduce.layers.embedding import Output
from transduce.layers.transformer import ProjectedMemory, TransformerStack

ALIGNED = 16  # fused kernels need aligned mask rows


class TransformerDecoder(TransformerStack, Decoder):
    """layers of masked self-attention, cross-attention and feed-forward (Vaswani 2017)"""

    causal = True
    output: Output

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
            past["next"] = torch.zeros(rows, dtype=torch.long, device=memory.mask.device)
        fixed: dict[str, Tree] = {"memory": projected, "mask": memory.mask}
        return State(fixed if memory.segment_ids is None else {**fixed, "owners": memory.segment_ids}, past)

    def pack(self, state: State, rows: PackedLayout) -> State:
        visible = rows.same_segment(rows.segment_ids)
        visible = visible.tril() if self.window is None else visible.tril().triu(-self.window)
        shared = {"places": rows.positions, "own": visible}
        return replace(
            state, fixed={**state.fixed, "mask": rows.same_segment(state.fixed["owners"])[:, 0], "shared": shared}
        )

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        roomy = "room" in state.fixed  # a search preallocated the cache: see `reserve`
        view, past = self._place(state) if roomy else self._look(tokens, state, mask)
        # Training gives no mask, as right padding cannot reach a real row; only batch norm needs it.
        real = tokens != PAD if mask is None else mask
        view = replace(view, real=real, padded=mask is not None, with_attention=with_attention)
        values = self.embed(self.embedding(tokens), view.queries, view.real)
        memory = ProjectedMemory(state.fixed["memory"], state.fixed["mask"]) if state.fixed["memory"] else None
        passed = self.run_layers(values, state.fixed["room"] if roomy else state.past["layers"], view, memory)
        attention = Attention(passed.cross_attention, passed.self_attention) if with_attention else None
        state = replace(state, past=past if roomy else {**past, "layers": passed.past})
        return Step(self.output(passed.values), state, attention, passed.values)

    def reserve(self, state: State, more: int, beams: int) -> State:
        """Preallocated KV caches, with one slot per beam and position, stored per source. A beam that continues another
        one reads the slots of that one: `owners` gives the beam whose slot holds its token at each position."""
        if not self.has_kv_cache:
            return state
        if "room" in state.fixed:
            return _enlarged(state, more)
        rows, before = state.past["layers"][0][0].shape[0:3:2]
        lengths = torch.full((rows,), before, device=state.fixed["mask"].device)
        order = None
        if "real" in state.past:
            lengths = state.past["real"].sum(1)
            order = (~state.past["real"]).to(torch.uint8).sort(dim=1, stable=True).indices  # real rows to the front
        room = -(-(before + more) // ALIGNED) * ALIGNED

        def widen(cache: Tensor) -> Tensor:  # B G U K -> B N L G K
            if order is not None:
                cache = cache.gather(2, order[:, None, :, None].expand_as(cache))
            wide = zeros((rows, beams, room, cache.size(1), cache.size(3)), cache)
            wide[:, 0, :before] = cache.transpose(1, 2)
            return wide

        layers = tuple(tuple(widen(part) for part in layer) for layer in state.past["layers"])
        owners = torch.zeros(rows, room, dtype=torch.int16, device=lengths.device)
        fixed = {**state.fixed, "room": layers}
        if lengths.is_cpu:  # CPU kernels need an additive mask: computed once per search, not per layer and step
            fixed["additive_mask"] = additive_mask(state.fixed["mask"][:, None, None])
        return State(fixed, {"next": lengths, "owners": owners}, state.beams)

    def _place(self, state: State) -> tuple[SequenceContext, dict[str, Tensor]]:
        """Context of one new token per row in a preallocated cache, and the next state."""
        places, owners = state.past["next"], state.past["owners"]  # R, R L
        rows, beams, room = len(places), state.beams, owners.size(1)
        if beams > 1:
            beam = torch.arange(beams, dtype=owners.dtype, device=places.device)  # N
            owners = owners.scatter(1, places[:, None], beam.repeat(rows // beams)[:, None])
        where = CacheSlots(places, owners, beams, self.window)
        every = torch.arange(room, device=places.device)[None]
        view = SequenceContext(
            self.position, places[:, None], every, slots=where, source=state.fixed.get("additive_mask")
        )
        # A captured search checks for its end only now and then: steps after the end stay in the last slot.
        return view, {"next": (places + 1).clamp(max=room - 1), "owners": owners}

    def _look(self, tokens: Tensor, state: State, mask: Tensor | None) -> tuple[SequenceContext, dict[str, Tensor]]:
        """Context of the new tokens, and the positions in the next state.

        Packed sequences use the masks of `pack`, and no step follows them. Without padding, positions are counts and
        are not stored. Once a mask was given, the state stores which cached rows are real, and their positions.
        """
        if "shared" in state.fixed:
            shared = state.fixed["shared"]
            return SequenceContext(self.position, shared["places"], shared["places"], shared["own"]), {}
        rows, steps = tokens.shape
        new = torch.arange(steps, device=tokens.device)
        if not self.has_kv_cache:
            queries = state.past["next"][:, None] + new  # R T
            following = state.past["next"] + (steps if mask is None else mask.sum(1))
            return SequenceContext(self.position, queries, queries), {"next": following}
        before: int = state.past["layers"][0][0].size(2)
        if mask is None and "real" not in state.past:
            places = torch.arange(before + steps, device=tokens.device)[None]  # 1 U
            whole = bool(before == 0) and self.window is None  # a plain causal mask
            seen = None if whole or (steps == 1 and self.window is None) else self._visible(places[:, before:], places)
            return SequenceContext(self.position, places[:, before:], places, seen, whole), {}
        fresh = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        real = torch.cat((state.past.get("real", fresh.new_ones(rows, before)), fresh), 1)
        queries = real[:, :before].sum(1, keepdim=True) + new  # R T
        unpadded = torch.arange(before, device=tokens.device).expand(rows, -1)
        places = torch.cat((state.past.get("places", unpadded), queries), 1)  # R U
        seen = self._visible(queries, places, real)
        return SequenceContext(self.position, queries, places, seen), {"real": real, "places": places}

    def _visible(self, queries: Tensor, places: Tensor, real: Tensor | None = None) -> Tensor:
        """. 1 T U: a new token attends to itself and to earlier real tokens within the window."""
        steps, total = queries.size(1), places.size(1)
        square = torch.ones(steps, total, dtype=torch.bool, device=queries.device)
        visible = square.tril(total - steps)[None]
        if real is not None:
            visible = visible & real[:, None]
        if self.window is not None:
            visible = visible & (queries[:, :, None] - places[:, None] <= self.window)
        # Padded rows attend to themselves: the softmax of an empty row would be nan.
        itself = square.tril(total - steps) & square.triu(total - steps)
        return (visible | itself)[:, None]


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on a CPU from numpy, whose pages the system clears on first use: most of a cache is never used."""
    if like.is_cpu and like.dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, np.float32))
    return like.new_zeros(shape)


def _enlarged(state: State, more: int) -> State:
    """The same state with `more` positions in every cache."""
    layers = tuple(tuple(F.pad(part, (0, 0, 0, 0, 0, more)) for part in layer) for layer in state.fixed["room"])
    past = {**state.past, "owners": F.pad(state.past["owners"], (0, more))}
    return State({**state.fixed, "room": layers}, past, state.beams)
