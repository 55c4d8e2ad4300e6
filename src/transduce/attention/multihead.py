"""Attention with any score and normaliser, local windows, multi-head attention and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import AttentionScore, Count, Normaliser, Window, WindowMask
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.attention import AttentionInput, attention
from transduce.kernels.linear import joint_linear, linear
from transduce.layers.feed_forward import dense
from transduce.layers.option_groups import AttentionOptions

PROJECTION_GAIN = 2**-0.5  # of the initial weights of q_proj, k_proj and v_proj


class Attend(nn.Module):
    """softmax(score(q, k)) v, with any score and any normaliser.

    A dot product with a softmax runs in a fused kernel, which returns no weights. Requested weights are computed from
    the same queries and keys, so that a request never changes the result. Stateful parts use `stateful_forward`, one
    step at a time; `carries_past` says that the caller keeps their history.
    """

    def __init__(
        self, score: AttentionScore, normaliser: Normaliser, dropout: float = 0.0, *, carries_past: bool = False
    ) -> None:
        super().__init__()
        self.stateful = score.stateful or normaliser.stateful
        if self.stateful and not carries_past:
            part = type(score if score.stateful else normaliser).__name__.lower()
            raise InputError(
                f"{part} attention depends on earlier weights, which only a recurrent decoder keeps in its state",
                remedy=f"choose another score or normaliser, or use {part} in the context of a recurrent decoder",
            )
        if normaliser.stochastic and not carries_past:
            raise InputError(
                "sampled attention learns from the weights it returns, which are not used here",
                remedy="use it in the context of a recurrent decoder, or choose another normaliser",
            )
        self.score, self.normaliser, self.dropout = score, normaliser, dropout
        self.fused = score.scale is not None and normaliser.fusible

    def keys(self, values: Tensor) -> Tensor:
        return self.score.keys(values)

    def forward(
        self,
        query: Tensor,  # ... T Q
        keys: Tensor,  # ... S K
        values: Tensor,  # ... S D
        mask: Tensor | None = None,  # broadcastable to ... T S
        bias: Tensor | None = None,  # added to the scores
        *,
        causal: bool = False,  # T = S: each row attends to itself and earlier rows; replaces the mask
        with_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.fused and not with_attention:
            return self._fused(query, keys, values, mask, bias, causal), None
        simple = self.normaliser.fusible and bias is None and not (causal or with_attention or self.dropout)
        if simple and (contexts := self.score.contexts(query, keys, values, mask)) is not None:
            return contexts, None
        weights = self._weights(query, keys, mask, bias, causal)
        if self.fused:
            return self._fused(query, keys, values, mask, bias, causal), weights
        context = F.dropout(self.used(weights), self.dropout, self.training) @ values
        return context, weights if with_attention else None

    def used(self, weights: Tensor) -> Tensor:
        """The weights as the context uses them: without gradient where they are sampled."""
        return weights.detach() if self.normaliser.stochastic else weights

    def entropy(
        self,
        query: Tensor,
        keys: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        past: dict[str, Tree] | None = None,  # the history of stateful parts
    ) -> Tensor | None:
        """The entropy of the sampling distribution; None where nothing is sampled."""
        if not self.normaliser.stochastic:
            return None
        scores = self.score(query, keys) if past is None else self.score.stateful_forward(query, keys, past["score"])
        return self.normaliser.entropy(scores if bias is None else scores + bias, mask)

    def stateful_forward(
        self,
        query: Tensor,  # B N Q: one step of each hypothesis
        keys: Tensor,  # B S K
        values: Tensor,  # B S D
        mask: Tensor,  # broadcastable to B N S
        bias: Tensor | None,
        past: dict[str, Tree],  # B N ...: the histories of score and normaliser
    ) -> tuple[Tensor, Tensor]:
        scores = self.score.stateful_forward(query, keys, past["score"])
        weights = self.normaliser.stateful_forward(scores if bias is None else scores + bias, mask, past["normaliser"])
        return F.dropout(self.used(weights), self.dropout, self.training) @ values, weights

    def _weights(self, query: Tensor, keys: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor:
        scores = self.score(query, keys)
        if bias is not None:
            scores = scores + bias
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights: Tensor = self.normaliser(scores, mask)
        return weights

    def _fused(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        assert self.score.scale is not None
        return attention(AttentionInput(query, keys, values, mask, bias, self.score.scale, causal, dropout))


def _distances(mask: Tensor, centres: Tensor) -> Tensor:
    """The distance of each row from the centre: mask (B 1 S), centres (B T) -> B T S."""
    return mask.cumsum(-1) - 1 - centres.unsqueeze(-1)


class PredictedWindow(Window):
    """p_t = S sigmoid(v . tanh(W s_t)), rows within the radius, Gaussian of deviation radius / 2 (Luong 2015, local-p)

    The Gaussian enters before the normaliser as its logarithm, so that the weights still sum to 1: under a softmax
    they are the paper's, divided by their sum.
    """

    def __init__(self, query_width: int, *, radius: Count = 10) -> None:
        super().__init__()
        self.radius = radius
        self.q_proj = dense(query_width, query_width, bias=False)
        self.position_proj = dense(query_width, 1, bias=False)

    def forward(self, query: Tensor, mask: Tensor, past: Tree) -> WindowMask:
        lengths = mask.sum(-1)  # B 1
        centres = lengths * self.position_proj(torch.tanh(self.q_proj(query))).squeeze(-1).sigmoid()  # B T
        distances = _distances(mask, centres)
        bias = -2 * (distances / self.radius).square()  # -d^2 / (2 sigma^2)
        return WindowMask(mask & (distances.abs() <= self.radius), bias)


class MonotonicWindow(Window):
    """p_t = t, rows within the radius; the last row for larger t (Luong 2015, local-m)"""

    stateful = True

    def __init__(self, query_width: int, *, radius: Count = 10) -> None:
        super().__init__()
        self.radius = radius

    def start(self, mask: Tensor) -> Tree:
        return {"steps": mask.new_zeros(mask.size(0), 1, dtype=torch.long)}

    def update(self, past: Tree, weights: Tensor) -> Tree:
        return {"steps": past["steps"] + 1}

    def forward(self, query: Tensor, mask: Tensor, past: Tree) -> WindowMask:
        centres = torch.minimum(past["steps"].squeeze(-1), mask.sum(-1) - 1)  # B T
        return WindowMask(mask & (_distances(mask, centres).abs() <= self.radius))


WINDOWS: dict[str, type[Window]] = {"predicted": PredictedWindow, "monotonic": MonotonicWindow}


class MultiHeadAttention(nn.Module):
    """concat_h(attend(W_q x, W_k m, W_v m)) W_o (Vaswani 2017): the base of self- and cross-attention

    With fewer key-value heads than heads, groups of heads share keys and values (grouped-query attention, Ainslie 2023;
    one head: multi-query attention, Shazeer 2019), and the cache is that much smaller. Without projections the score
    is e = x_i . x_j.
    """

    def __init__(self, width: int, memory_width: int, options: AttentionOptions, bias: bool = True) -> None:
        super().__init__()
        _check(width, memory_width, options)
        self.heads, self.kv_heads = options.heads, options.key_value_heads
        self.head_width = head = options.head_width or width // options.heads
        self.q_proj: nn.Module = nn.Identity()
        self.k_proj: nn.Module = nn.Identity()
        self.v_proj: nn.Module = nn.Identity()
        self.out_proj: nn.Module = nn.Identity()
        if options.projections == "all":
            # With the gain, a post-norm model on Multi30k had a development loss of 2.5 after 1,000 updates; without
            # it, of 3.3, and 2.4 only after 1,500 (one run each).
            self.q_proj = dense(width, options.heads * head, bias, PROJECTION_GAIN)
            self.k_proj = dense(memory_width, options.key_value_heads * head, bias, PROJECTION_GAIN)
            self.v_proj = dense(memory_width, options.key_value_heads * head, bias, PROJECTION_GAIN)
            self.out_proj = dense(options.heads * head, width, bias)
        self.attend = Attend(options.score(head, head), options.normaliser(), options.attention_dropout)

    def queries(self, rows: Tensor) -> Tensor:
        """Queries of rows: R T D -> R H T K."""
        return _heads(linear(self.q_proj, rows), self.heads)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory (B S D), computed once per source: B G S K, with G key-value heads."""
        keys, values = joint_linear((self.k_proj, self.v_proj), memory)
        return self.attend.keys(_heads(keys, self.kv_heads)), _heads(values, self.kv_heads)

    def queries_keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same rows."""
        query, keys, values = joint_linear((self.q_proj, self.k_proj, self.v_proj), rows)
        keys, values = _heads(keys, self.kv_heads), _heads(values, self.kv_heads)
        return _heads(query, self.heads), self.attend.keys(keys), values

    def attend_heads(
        self,
        query: Tensor,  # R H T K: queries(x), rotated by the position encoding where it does so
        keys: Tensor,  # R G S K
        values: Tensor,  # R G S K
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        with_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.kv_heads < self.heads:  # all heads of a group use the same keys and values
            group = self.heads // self.kv_heads
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        context, weights = self.attend(query, keys, values, mask, bias, causal=causal, with_attention=with_attention)
        return linear(self.out_proj, context.transpose(1, 2).flatten(-2)), weights  # R T D, R H T S


class CrossAttention(MultiHeadAttention):
    """Multi-head attention of target rows to an encoder's memory."""

    def forward(
        self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, with_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Cross-attention of rows (R T D) to a memory with one row per source (B G S K); mask: B S or B T S.

        The beams of a source become further query rows, so that its keys and values are never copied.
        """
        shape = rows.shape
        sources = keys.size(0)
        query = self.queries(rows.reshape(sources, -1, shape[-1]))  # B H N*T K
        mask = mask[:, None] if mask.dim() == 3 else mask[:, None, None]  # B 1 . S
        context, weights = self.attend_heads(query, keys, values, mask, with_attention=with_attention)
        if weights is not None:
            beams = shape[0] // sources
            weights = weights.unflatten(2, (beams, shape[1])).transpose(1, 2).flatten(0, 1)  # R H T S
        return context.view(shape), weights


def _heads(rows: Tensor, number: int) -> Tensor:
    """R T (H K) -> R H T K"""
    return rows.unflatten(-1, (number, -1)).transpose(1, 2)


def layers_and_heads(attentions: Sequence[CrossAttention | None]) -> tuple[int, int]:
    """The number of layers with cross-attention, and of heads in each."""
    present = [attention for attention in attentions if attention is not None]
    return len(present), present[0].heads if present else 0


def _check(width: int, memory_width: int, options: AttentionOptions) -> None:
    if width % options.heads and options.head_width is None:
        raise InputError(
            f"a width of {width} cannot be divided into {options.heads} heads",
            remedy="choose heads that divide the width, or set head_width",
        )
    if options.heads % options.key_value_heads:
        raise InputError(
            f"{options.heads} heads cannot share {options.key_value_heads} key heads evenly",
            remedy="choose kv_heads that divide heads",
        )
    uneven = options.head_width is not None and options.head_width * options.heads != width
    unequal = memory_width != width or options.key_value_heads != options.heads or uneven
    if options.projections == "none" and unequal:
        raise InputError(
            "attention without projections compares rows as they are: widths and heads of both sides must be equal",
            remedy="give encoder and decoder one width and leave kv_heads out, or set projections: all",
        )
