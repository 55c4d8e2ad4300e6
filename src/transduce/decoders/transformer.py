"""A memory and target ids in, scores for the next ids out, by masked self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHead
from transduce.attention.normalisers import Softmax
from transduce.attention.positions import Sinusoidal
from transduce.attention.scores import ScaledDot
from transduce.contracts import Count, Decoder, Normaliser, Position, Rate, Score
from transduce.flow import Attention, Memory, State, Step
from transduce.layers.dense import Activation, FeedForward
from transduce.layers.embedding import Embedding, Output
from transduce.layers.residual import Place, Residual

KeysValues = tuple[Tensor, Tensor]  # each R H U K


@dataclass(frozen=True)
class View:
    """What the tokens of one call may see of the target so far, and where everything stands."""

    position: Position
    queries: Tensor  # 1 T or R T: places of the new tokens
    keys: Tensor  # 1 U or R U: places of all tokens so far, the new ones included
    mask: Tensor | None  # . 1 T U
    causal: bool  # the plain triangle: no mask needed
    with_attention: bool


class TransformerDecoder(Decoder):
    """masked self-attention, cross-attention and feed-forward blocks (Vaswani 2017)"""

    blocks: Sequence[DecoderBlock]

    def __init__(
        self,
        embedding: Embedding,
        output: Output,
        memory_width: int,
        *,
        layers: Count = 3,
        width: Count = 256,
        heads: Count = 4,
        hidden: Count = 1024,
        activation: Activation = "relu",
        norm: Place = "before",
        position: type[Position] = Sinusoidal,
        score: type[Score] = ScaledDot,
        normaliser: type[Normaliser] = Softmax,
        dropout: Rate = 0.1,
        attention_dropout: Rate = 0.0,
        hidden_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.embedding, self.output, self.dropout = embedding, output, nn.Dropout(dropout)
        self.position, self.heads, self.head_width = position(width, heads, True), heads, width // heads

        def attention(over: int) -> MultiHead:
            return MultiHead(width, over, heads, score, normaliser, attention_dropout)

        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            DecoderBlock(
                attention(width),
                attention(memory_width) if memory_width else None,
                FeedForward(width, hidden, activation, hidden_dropout),
                [Residual(width, norm, dropout) for _ in range(3 if memory_width else 2)],
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width) if norm == "before" else nn.Identity()

    def start(self, memory: Memory) -> State:
        projected = tuple(block.cross.project(memory.values) for block in self.blocks if block.cross is not None)
        fixed = {"memory": projected, "mask": memory.mask}
        rows = memory.mask.size(0)
        empty = self.embedding.table.weight.new_zeros(rows, self.heads, 0, self.head_width)
        return State(fixed, {"layers": ((empty, empty),) * len(self.blocks)})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        view, past = self._view(tokens, state, mask, with_attention)
        values = self.dropout(self.position.add(self.embedding(tokens), view.queries))
        memory: tuple[KeysValues, ...] = state.fixed["memory"]
        memory_mask: Tensor = state.fixed["mask"]
        caches: list[KeysValues] = []
        own: list[Tensor] = []
        cross: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            cache: KeysValues = state.past["layers"][number]
            values, cache, seen = block.look_back(values, cache, view)
            own += [seen] if seen is not None else []
            if memory:
                values, seen = block.look_up(values, memory[number], memory_mask, with_attention)
                cross += [seen] if seen is not None else []
            values = block.think(values)
            caches.append(cache)
        logits = self.output(self.norm(values))  # R T V
        attention = None
        if with_attention:
            attention = Attention(torch.stack(cross, 1) if cross else None, torch.stack(own, 1))
        return Step(logits, replace(state, past={**past, "layers": tuple(caches)}), attention)

    def _view(
        self, tokens: Tensor, state: State, mask: Tensor | None, with_attention: bool
    ) -> tuple[View, dict[str, Tensor]]:
        """Without padding, places are plain counts and nothing is remembered of them. Once a mask was given, the
        state remembers which cached rows are real and where each stands."""
        rows, steps = tokens.shape
        before: int = state.past["layers"][0][0].size(2)
        if mask is None and "real" not in state.past:
            places = torch.arange(before + steps, device=tokens.device)[None]  # 1 U
            whole = before == 0  # the plain triangle
            triangle = None if whole or steps == 1 else _triangle(steps, before, tokens.device)
            return View(self.position, places[:, before:], places, triangle, whole, with_attention), {}
        new = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        old = new.new_ones(rows, before)
        steady = torch.arange(before, device=tokens.device).expand(rows, -1)
        real = torch.cat((state.past.get("real", old), new), 1)
        queries = real[:, :before].sum(1, keepdim=True) + torch.arange(steps, device=tokens.device)  # R T
        places = torch.cat((state.past.get("places", steady), queries), 1)
        visible = real[:, None, None] & _triangle(steps, before, tokens.device)  # R 1 T U
        return View(self.position, queries, places, visible, False, with_attention), {
            "real": real,
            "places": places,
        }


def _triangle(steps: int, before: int, device: torch.device) -> Tensor:
    """T U: a new token sees all cached ones, itself and the new ones before it."""
    return torch.ones(steps, before + steps, dtype=torch.bool, device=device).tril(before)


class DecoderBlock(nn.Module):
    """look back at the target, look up in the memory, think"""

    def __init__(
        self, own: MultiHead, cross: MultiHead | None, feed_forward: FeedForward, residuals: list[Residual]
    ) -> None:
        super().__init__()
        self.own, self.cross, self.feed_forward = own, cross, feed_forward
        self.residuals = nn.ModuleList(residuals)

    def look_back(self, values: Tensor, cache: KeysValues, view: View) -> tuple[Tensor, KeysValues, Tensor | None]:
        weights: Tensor | None = None

        def look(rows: Tensor) -> Tensor:
            nonlocal cache, weights
            query = view.position.turn(self.own.split(self.own.query(rows)), view.queries)
            keys, content = self.own.project(rows)
            keys = view.position.turn(keys, view.queries)
            cache = (torch.cat((cache[0], keys), 2), torch.cat((cache[1], content), 2))
            context, weights = self.own(
                query,
                *cache,
                view.mask,
                view.position.bias(query, view.queries, view.keys),
                causal=view.causal,
                with_attention=view.with_attention,
            )
            result: Tensor = context
            return result

        values = self.residuals[0](values, look)
        return values, cache, weights

    def look_up(
        self, values: Tensor, memory: KeysValues, mask: Tensor, with_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self.cross is not None
        weights: Tensor | None = None

        def look(rows: Tensor) -> Tensor:
            nonlocal weights
            assert self.cross is not None
            context, weights = self.cross.read(rows, *memory, mask, with_attention=with_attention)
            return context

        values = self.residuals[1](values, look)
        return values, weights

    def think(self, values: Tensor) -> Tensor:
        result: Tensor = self.residuals[-1](values, self.feed_forward)
        return result
