"""A memory and target ids in, scores for the next ids out, by a look back, a look up and a thought a layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transduce.attention.blocks import Blocks, Source
from transduce.attention.own import View
from transduce.contracts import Decoder
from transduce.flow import PAD, Attention, Memory, State, Step, Tree
from transduce.layers.embedding import Output


class TransformerDecoder(Blocks, Decoder):
    """masked self-attention, cross-attention and feed-forward blocks (Vaswani 2017)"""

    causal = True
    output: Output

    @property
    def attends(self) -> tuple[int, int]:
        cross = [block.cross for block in self.blocks if block.cross is not None]
        return len(cross), cross[0].heads if cross else 0

    def start(self, memory: Memory) -> State:
        projected = tuple(block.cross.project(memory.values) for block in self.blocks if block.cross is not None)
        rows = memory.mask.size(0)
        past: dict[str, Tree] = {"layers": self.begin(rows)}
        if not self.caches:  # nothing whose length tells the place
            past["next"] = torch.zeros(rows, dtype=torch.long, device=memory.mask.device)
        return State({"memory": projected, "mask": memory.mask}, past)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        view, past = self._look(tokens, state, mask)
        # Training gives no mask, as padding on the right can reach no real row; only a batch norm must be told of it.
        real = tokens != PAD if mask is None else mask
        view = replace(view, real=real, padded=mask is not None, with_attention=with_attention)
        values = self.dropout(self.position.add(self.embedding(tokens), view.queries))
        memory = Source(state.fixed["memory"], state.fixed["mask"]) if state.fixed["memory"] else None
        passed = self.run(values, state.past["layers"], view, memory)
        attention = Attention(passed.cross, passed.own) if with_attention else None
        state = replace(state, past={**past, "layers": passed.past})
        return Step(self.output(passed.values), state, attention, passed.values)

    def _look(self, tokens: Tensor, state: State, mask: Tensor | None) -> tuple[View, dict[str, Tensor]]:
        """What the new tokens see, and what the next state remembers of places.

        Without padding, places are plain counts and nothing is remembered of them. Once a mask was given, the state
        remembers which cached rows are real and where each stands.
        """
        rows, steps = tokens.shape
        new = torch.arange(steps, device=tokens.device)
        if not self.caches:
            queries = state.past["next"][:, None] + new  # R T
            following = state.past["next"] + (steps if mask is None else mask.sum(1))
            return View(self.position, queries, queries), {"next": following}
        before: int = state.past["layers"][0][0].size(2)
        if mask is None and "real" not in state.past:
            places = torch.arange(before + steps, device=tokens.device)[None]  # 1 U
            whole = before == 0 and self.reach is None  # the plain triangle
            seen = None if whole or (steps == 1 and self.reach is None) else self._visible(places[:, before:], places)
            return View(self.position, places[:, before:], places, seen, whole), {}
        fresh = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        real = torch.cat((state.past.get("real", fresh.new_ones(rows, before)), fresh), 1)
        queries = real[:, :before].sum(1, keepdim=True) + new  # R T
        steady = torch.arange(before, device=tokens.device).expand(rows, -1)
        places = torch.cat((state.past.get("places", steady), queries), 1)  # R U
        seen = self._visible(queries, places, real)
        return View(self.position, queries, places, seen), {"real": real, "places": places}

    def _visible(self, queries: Tensor, places: Tensor, real: Tensor | None = None) -> Tensor:
        """. 1 T U: a new token sees itself and, within its reach, the real ones before it."""
        steps, total = queries.size(1), places.size(1)
        square = torch.ones(steps, total, dtype=torch.bool, device=queries.device)
        visible = square.tril(total - steps)[None]
        if real is not None:
            visible = visible & real[:, None]
        if self.reach is not None:
            visible = visible & (queries[:, :, None] - places[:, None] <= self.reach)
        # Padded rows see themselves at least: a row without anything to see would be nan.
        itself = square.tril(total - steps) & square.triu(total - steps)
        return (visible | itself)[:, None]
