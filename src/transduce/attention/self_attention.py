"""Token mixers: self-attention, average attention and SSRU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHeadAttention
from transduce.contracts import PositionEncoding
from transduce.flow import Tree
from transduce.layers.feed_forward import FeedForward, dense

TokenMixerKind = Literal["attention", "ssru", "average"]


@dataclass(frozen=True)
class CacheSlots:
    """Slots of a preallocated KV cache B N L G K: one per beam and position."""

    places: Tensor  # R: the position of each new row
    owners: Tensor  # R L: the beam whose slot holds the token of a row at each position
    beams: int  # N
    reach: int | None = None  # how far back a row attends; None: to all earlier rows

    @cached_property
    def rows(self) -> Tensor:
        """R: the slot, of B*N*L, that each new row fills."""
        rows, room = self.owners.shape
        return torch.arange(rows, device=self.places.device) * room + self.places

    @cached_property
    def mask(self) -> Tensor:
        """B 1 N N*L: the slots that each beam attends to."""
        slots = torch.arange(self.owners.size(1), device=self.places.device)
        seen = slots <= self.places[:, None]  # R L
        if self.reach is not None:
            seen = seen & (self.places[:, None] - slots <= self.reach)
        if self.beams > 1:
            own = torch.arange(self.beams, dtype=self.owners.dtype, device=slots.device)  # N
            seen = (seen[:, None] & (self.owners[:, None] == own[:, None])).flatten(1)  # R N*L
        return seen.unflatten(0, (-1, self.beams))[:, None]

    @cached_property
    def shade(self) -> Tensor:
        """The additive form of `mask`, computed once for all layers."""
        return shade(self.mask)


def shade(mask: Tensor) -> Tensor:
    """A boolean mask as a bias of the scores: 0 or -inf."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


@dataclass(frozen=True)
class SequenceContext:
    """Masks, positions and cache slots of one call, shared by all layers."""

    position: PositionEncoding
    queries: Tensor  # 1 T or R T: positions of the new rows
    keys: Tensor  # 1 U or R U: positions of all rows so far, including the new ones
    mask: Tensor | None = None  # broadcastable to R H T U
    causal: bool = False  # causal mask without padding: no mask tensor needed
    real: Tensor | None = None  # R T: the new rows that are not padding
    padded: bool = False  # True: padding must not enter the state
    with_attention: bool = False
    slots: CacheSlots | None = None  # of a preallocated cache, which new rows are written into
    source: Tensor | None = None  # B 1 1 S: the memory mask as a bias, 0 or -inf


class TokenMixer(nn.Module, ABC):
    """The sub-layer that mixes the rows of one sequence."""

    @abstractmethod
    def start(self, rows: int, like: Tensor) -> Tree:
        """The state before the first row."""

    @abstractmethod
    def forward(self, rows: Tensor, past: Tree, view: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        """rows (R T D) -> rows (R T D), the next state, attention weights (R H T U) where requested and defined."""


class SelfAttention(MultiHeadAttention, TokenMixer):
    """multi-head self-attention over all rows, earlier rows, or a window (Vaswani 2017)"""

    def start(self, rows: int, like: Tensor) -> Tree:
        empty = like.new_zeros(rows, self.kv_heads, 0, self.head_width)
        return empty, empty

    def forward(self, rows: Tensor, past: Tree, view: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        query, keys, values = self.queries_keys_values(rows)
        query, keys = view.position.rotate(query, view.queries), view.position.rotate(keys, view.queries)
        if view.slots is not None:
            return self._fill(query, keys, values, past, view, view.slots), past, None
        if past[0].size(2):
            keys, values = torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)  # R G U K
        context, weights = self.attend_heads(
            query,
            keys,
            values,
            view.mask,
            view.position.bias(query, view.queries, view.keys),
            causal=view.causal,
            with_attention=view.with_attention,
        )
        return context, (keys, values), weights

    def _fill(
        self, query: Tensor, keys: Tensor, values: Tensor, past: Tree, view: SequenceContext, slots: CacheSlots
    ) -> Tensor:
        """Attention of one new row each (R H 1 K), written into the cache. Beams of a source are query rows."""
        for cache, new in zip(past, (keys, values), strict=True):  # B N L G K, R G 1 K
            cache.flatten(0, 2).index_copy_(0, slots.rows, new.squeeze(2).to(cache.dtype))
        bias = view.position.bias(query, view.queries, view.keys)
        if bias is not None:  # . H 1 L -> B H N N*L: the same for every beam that a slot belongs to
            bias = bias.expand(len(query), -1, -1, -1).unflatten(0, (-1, slots.beams)).transpose(1, 2).squeeze(3)
            bias = bias.repeat(1, 1, 1, slots.beams)
        together = query.unflatten(0, (-1, slots.beams)).transpose(1, 2).squeeze(3)  # B H N K
        cached_keys, cached_values = (cache.flatten(1, 2).transpose(1, 2) for cache in past)  # B G N*L K
        context, _ = self.attend_heads(together, cached_keys, cached_values, slots.mask, bias)
        return context.flatten(0, 1)[:, None]  # R 1 D


class SSRU(TokenMixer):
    """f_t = sigmoid(W_f x_t + b), c_t = f_t c_{t-1} + (1 - f_t) W x_t, relu(c_t): the state is one vector (Kim 2019)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        # The forget gate always has a bias: it sets the initial time scale of the state.
        self.forget, self.content = dense(width, width), dense(width, width, bias=False)

    def start(self, rows: int, like: Tensor) -> Tree:
        return like.new_zeros(rows, self.width)

    def forward(self, rows: Tensor, past: Tree, view: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        # In the precision of the state, even under autocast: long products need it.
        kept, content = torch.sigmoid(self.forget(rows)).to(past), self.content(rows).to(past)  # R T D
        if view.padded and view.real is not None:
            kept = kept.masked_fill(~view.real[..., None], 1.0)  # padding does not change the state
        kept, cells = scan(kept, (1 - kept) * content)
        cells = cells + kept * past[:, None]
        return torch.relu(cells), cells[:, -1], None


def scan(decay: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """c_t = decay_t c_{t-1} + inputs_t from c = 0, for all t in log T steps (parallel scan).

    Gives the product of the decays up to each t, by which an earlier state would come through, and c_t.
    """
    reach = 1
    while reach < inputs.size(1):
        inputs = torch.cat((inputs[:, :reach], inputs[:, reach:] + decay[:, reach:] * inputs[:, :-reach]), 1)
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
        reach *= 2
    return decay, inputs


class AverageAttention(TokenMixer):
    """g_t = FFN(mean of x_1 .. x_t), i x_t + f g_t, i, f = sigmoid(W [x_t; g_t]): the state is a sum (Zhang 2018)"""

    def __init__(self, width: int, feed_forward: FeedForward, bias: bool) -> None:
        super().__init__()
        self.width, self.feed_forward, self.gates = width, feed_forward, dense(2 * width, 2 * width, bias)

    def start(self, rows: int, like: Tensor) -> Tree:
        return like.new_zeros(rows, self.width), like.new_zeros(rows, 1)

    def forward(self, rows: Tensor, past: Tree, view: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        real = torch.ones_like(rows[..., :1], dtype=past[1].dtype)
        if view.padded and view.real is not None:
            real = view.real[..., None].to(past[1])
        totals = past[0][:, None] + (rows * real).cumsum(1)  # R T D, in the precision of the past
        counts = past[1][:, None] + real.cumsum(1)  # R T 1
        mean = self.feed_forward(totals / counts)
        keep, take = torch.sigmoid(self.gates(torch.cat((rows, mean), -1))).chunk(2, -1)
        return keep * rows + take * mean, (totals[:, -1], counts[:, -1]), None
