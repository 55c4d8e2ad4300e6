"""Self-attention, and the token mixers that can take its place.

Disentangled attention, attention of Transformer-XL, average attention, and SSRU.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.attention.multihead import MultiHeadAttention
from transduce.contracts import Count, SequenceContext, TokenMixer
from transduce.flow import CacheSlots, Tree
from transduce.layers.feed_forward import dense
from transduce.layers.option_groups import SublayerOptions


class SelfAttention(MultiHeadAttention, TokenMixer):
    """multi-head self-attention over all rows, earlier rows, or a window (Vaswani 2017)"""

    has_kv_cache = True

    def __init__(self, width: int, options: SublayerOptions) -> None:
        super().__init__(width, width, options.attention, options.bias)

    def start(self, rows: int, like: Tensor) -> Tree:
        empty = like.new_zeros(rows, self.kv_heads, 0, self.head_width)
        return empty, empty

    def forward(self, rows: Tensor, past: Tree, sequence: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        query, keys, values = self.queries_keys_values(rows)
        query, keys = (sequence.position.rotate(heads, sequence.queries) for heads in (query, keys))
        if sequence.slots is not None:
            return self._attend_cache(query, keys, values, past, sequence, sequence.slots), past, None
        if past[0].size(2):
            keys, values = torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)  # R G U K
        past = keys, values
        if sequence.prefix is not None:
            keys, values = map(_after, sequence.prefix, past)
        context, weights = self.attend_heads(
            query,
            keys,
            values,
            sequence.mask,
            _sum(
                sequence.position.bias(query, sequence.queries, sequence.keys),
                self.relative_scores(query, keys, sequence.queries, sequence.keys),
            ),
            causal=sequence.causal,
            with_attention=sequence.with_attention,
        )
        return context, past, weights

    def relative_scores(self, query: Tensor, keys: Tensor, queries: Tensor, positions: Tensor) -> Tensor | None:
        """Scores of contents and distances, added to those of contents: R H T K, R G S K, . T, . S -> R H T S."""
        return None

    def _attend_cache(
        self, query: Tensor, keys: Tensor, values: Tensor, past: Tree, sequence: SequenceContext, slots: CacheSlots
    ) -> Tensor:
        """Attention of one new row each (R H 1 K), after its key and value are written into the cache.

        The beams of a source are query rows over one joint cache; the mask of the slots separates them.
        """
        for cache, new in zip(past, (keys, values), strict=True):  # B N L G K, R G 1 K
            cache.flatten(0, 2).index_copy_(0, slots.rows, new.squeeze(2).to(cache.dtype))
        bias = sequence.position.bias(query, sequence.queries, sequence.keys)
        if bias is not None:  # . H 1 L -> B H N N*L: the same for every beam that a slot belongs to
            bias = bias.expand(len(query), -1, -1, -1).unflatten(0, (-1, slots.beams)).transpose(1, 2).squeeze(3)
            bias = bias.repeat(1, 1, 1, slots.beams)
        queries = query.unflatten(0, (-1, slots.beams)).transpose(1, 2).squeeze(3)  # B H N K
        cached_keys, cached_values = (cache.flatten(1, 2).transpose(1, 2) for cache in past)  # B G N*L K
        query_key_positions = sequence.queries.view(-1, slots.beams), sequence.keys.repeat(1, slots.beams)  # B N, . N*L
        bias, mask = _sum(bias, self.relative_scores(queries, cached_keys, *query_key_positions)), slots.mask
        if sequence.prefix is not None and sequence.mask is not None:
            cached_keys, cached_values = map(_after, sequence.prefix, (cached_keys, cached_values))
            mask = torch.cat((sequence.mask.expand(*mask.shape[:3], -1), mask), 3)
        context, _ = self.attend_heads(queries, cached_keys, cached_values, mask, bias)
        return context.flatten(0, 1)[:, None]  # R 1 D


def _after(prefix: Tensor, rows: Tensor) -> Tensor:
    """B G P K, R G U K -> R G P+U K"""
    return torch.cat((prefix.repeat_interleave(len(rows) // len(prefix), 0), rows), 2)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


class DisentangledAttention(SelfAttention):
    """(q_t . k_s + q_t . a_d + k_s . b_d) / sqrt(3 K), with learned a and b of the distance d = t - s (He 2021)"""

    def __init__(
        self,
        width: int,
        options: SublayerOptions,
        *,
        buckets: Count = 256,
        max_distance: Count | None = 512,
        terms: Literal["both", "query", "key"] = "both",
    ) -> None:
        """Distances up to `buckets` / 2 have vectors of their own, farther ones up to `max_distance` share them, the
        more of them the farther. `max_distance: null`: one vector for each distance below `buckets`. `terms`: `query`
        leaves out b, `key` leaves out a."""
        super().__init__(width, options)
        self.buckets, self.max_distance = buckets, max_distance
        columns = self.heads * self.head_width
        self.relative_keys = nn.Embedding(2 * buckets, columns) if terms != "key" else None
        self.relative_queries = nn.Embedding(2 * buckets, columns) if terms != "query" else None
        for table in (self.relative_keys, self.relative_queries):
            if table is not None:
                nn.init.normal_(table.weight, std=self.head_width**-0.5)
        self.share = (3 if terms == "both" else 2) ** -0.5

    def queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, values = super().queries_keys_values(rows)
        return query * self.share, keys, values

    def relative_scores(self, query: Tensor, keys: Tensor, queries: Tensor, positions: Tensor) -> Tensor:
        index = self._index(queries[:, :, None] - positions[:, None, :])[:, None]  # . 1 T S
        index = index.expand(len(query), self.heads, -1, -1)
        total, scale = query.new_zeros(()), self.head_width**-0.5
        if self.relative_keys is not None:
            total = total + self._products(query * scale, self.relative_keys).gather(-1, index)
        if self.relative_queries is not None:
            keys = keys.repeat_interleave(self.heads // self.kv_heads, 1)
            products = self._products(keys * (scale * self.share), self.relative_queries)  # R H S 2B
            total = total + products.gather(-1, index.transpose(2, 3)).transpose(2, 3)
        return total  # R H T S

    def _products(self, heads: Tensor, table: nn.Embedding) -> Tensor:
        vectors = table.weight.unflatten(1, (self.heads, -1)).to(heads.dtype)  # 2B H K
        return torch.einsum("rhtk,bhk->rhtb", heads, vectors)

    def _index(self, distances: Tensor) -> Tensor:
        if self.max_distance is not None:
            middle = self.buckets // 2
            near = distances.abs() < middle
            away = distances.abs().masked_fill(near, max(middle - 1, 0))
            growth = torch.log(away / middle) / math.log((self.max_distance - 1) / middle)
            far = torch.ceil(growth * (middle - 1)) + middle
            distances = torch.where(away <= middle, distances, (far * distances.sign()).long())
        return (distances + self.buckets).clamp(0, 2 * self.buckets - 1)


class TransformerXLAttention(SelfAttention):
    """((q_t + u) . k_s + (q_t + v) . W r_d) / sqrt(K), with learned u and v, and sines r of d = t - s (Dai 2019)"""

    frequencies: Tensor

    def __init__(self, width: int, options: SublayerOptions) -> None:
        super().__init__(width, options)
        frequencies = 10000 ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.relative_proj = dense(2 * len(frequencies), self.heads * self.head_width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(self.heads, self.head_width))
        self.position_bias = nn.Parameter(torch.zeros(self.heads, self.head_width))

    def relative_scores(self, query: Tensor, keys: Tensor, queries: Tensor, positions: Tensor) -> Tensor:
        scale, most = self.head_width**-0.5, positions.size(1)  # no two rows are farther apart
        distances = torch.arange(1 - most, most, device=query.device)
        angles = distances[:, None] * self.frequencies  # 2S-1 D/2
        vectors = self.relative_proj(torch.cat((angles.sin(), angles.cos()), -1).to(query.dtype))
        vectors = vectors.unflatten(1, (self.heads, -1)).to(query.dtype)  # 2S-1 H K
        biased = query + self.position_bias[:, None].to(query.dtype)
        products = torch.einsum("rhtk,dhk->rhtd", biased * scale, vectors)  # R H T 2S-1
        index = (queries[:, :, None] - positions[:, None, :] + most - 1)[:, None]  # . 1 T S
        keys = keys.repeat_interleave(self.heads // self.kv_heads, 1)
        content = torch.einsum("rhsk,hk->rhs", keys * scale, self.content_bias.to(keys.dtype))[:, :, None]
        return products.gather(-1, index.expand(len(query), self.heads, -1, -1)) + content  # R H T S


class SSRU(TokenMixer):
    """f_t = sigmoid(W_f x_t + b), c_t = f_t c_{t-1} + (1 - f_t) W x_t, relu(c_t): the state is one vector (Kim 2019)"""

    def __init__(self, width: int, options: SublayerOptions) -> None:
        super().__init__()
        self.width = width
        # The forget gate always has a bias: it sets the initial time scale of the state.
        self.forget, self.content = dense(width, width), dense(width, width, bias=False)

    def start(self, rows: int, like: Tensor) -> Tree:
        return like.new_zeros(rows, self.width)

    def forward(self, rows: Tensor, past: Tree, sequence: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        # In the precision of the state, even under autocast: long products need it.
        forget, content = torch.sigmoid(self.forget(rows)).to(past), self.content(rows).to(past)  # R T D
        if sequence.padded and sequence.real is not None:
            forget = forget.masked_fill(~sequence.real[..., None], 1.0)  # padding does not change the state
        decay, cells = scan(forget, (1 - forget) * content)
        cells = cells + decay * past[:, None]
        return torch.relu(cells), cells[:, -1], None


def scan(decay: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """c_t = decay_t c_{t-1} + inputs_t from c = 0, for all t in log T steps (parallel scan).

    Returns the product of the decays up to each t, which an initial state would be multiplied by, and c_t.
    """
    span = 1
    while span < inputs.size(1):
        inputs = torch.cat((inputs[:, :span], inputs[:, span:] + decay[:, span:] * inputs[:, :-span]), 1)
        decay = torch.cat((decay[:, :span], decay[:, span:] * decay[:, :-span]), 1)
        span *= 2
    return decay, inputs


class AverageAttention(TokenMixer):
    """g_t = FFN(mean of x_1 .. x_t), i x_t + f g_t, i, f = sigmoid(W [x_t; g_t]): the state is a sum (Zhang 2018)"""

    def __init__(self, width: int, options: SublayerOptions) -> None:
        super().__init__()
        self.width, self.feed_forward = width, options.feed_forward.make(width, options.bias)
        self.gates = dense(2 * width, 2 * width, options.bias)

    def start(self, rows: int, like: Tensor) -> Tree:
        return like.new_zeros(rows, self.width), like.new_zeros(rows, 1)

    def forward(self, rows: Tensor, past: Tree, sequence: SequenceContext) -> tuple[Tensor, Tree, Tensor | None]:
        real = torch.ones_like(rows[..., :1], dtype=past[1].dtype)
        if sequence.padded and sequence.real is not None:
            real = sequence.real[..., None].to(past[1])
        totals = past[0][:, None] + (rows * real).cumsum(1)  # R T D, in the precision of the past
        counts = past[1][:, None] + real.cumsum(1)  # R T 1
        mean = self.feed_forward(totals / counts)
        keep, take = torch.sigmoid(self.gates(torch.cat((rows, mean), -1))).chunk(2, -1)
        return keep * rows + take * mean, (totals[:, -1], counts[:, -1]), None


TOKEN_MIXERS: dict[str, type[TokenMixer]] = {
    "attention": SelfAttention,
    "disentangled": DisentangledAttention,
    "transformer_xl": TransformerXLAttention,
    "ssru": SSRU,
    "average": AverageAttention,
}
