"""Attention with any score and any normaliser, and windows of local attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import AttentionScore, Count, Normaliser, Window, WindowMask
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.attention import AttentionInput, attention
from transduce.layers.feed_forward import dense


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
