"""Attention with any score and any normaliser."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import AttentionScore, Normaliser
from transduce.errors import InputError
from transduce.flow import Tree
from transduce.kernels.attention import AttentionInput, attention


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
