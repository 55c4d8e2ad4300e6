"""Decoder with exact hard attention: the alignment is a latent variable, summed out by the forward algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.attention.scores import Bilinear
from transduce.contracts import AttentionScore, Count, Decoder, Rate
from transduce.errors import InputError
from transduce.flow import Attention, Memory, State, Step, Tree
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, LayerState, RecurrentStack

IMPOSSIBLE = -1e9  # log-probability; finite, so that sums over impossible alignments have a gradient


def check_stateless(score: AttentionScore) -> AttentionScore:
    """The score, which must not depend on earlier weights."""
    if score.stateful:
        raise InputError(
            "the score of hard attention cannot depend on earlier weights: it sums over all alignments",
            remedy="choose another score, such as bilinear or mlp",
        )
    return score


def initial_cells(bridge: nn.Module, rnn: RecurrentStack, summary: Tensor) -> tuple[LayerState, ...]:
    """The state of a recurrent stack from the summary of the source."""
    numbers = torch.tanh(bridge(summary)).unflatten(-1, (len(rnn.layers), rnn.tensors, -1))
    return tuple(layer.unbind(1) for layer in numbers.unbind(1))


class HardAttentionDecoder(Decoder):
    """p(y_t) = sum over s of p(a_t = s) p(y_t | s_t, h_s), exactly (Wu, Shapiro & Cotterell 2018; Wu & Cotterell 2019)

    The recurrent state s_t reads target tokens alone, so it does not depend on the alignment. Order 0: a_t depends on
    s_t. Order 1: on a_{t-1} too; the state then holds log p(a_t = s, y_t = v | y_<t) for every s and v, from which
    the next token selects the posterior of a_t. The logits are log-probabilities. Time and memory grow with source
    length x vocabulary, which suits characters and phones.
    """

    constant_state = True

    def __init__(
        self,
        embedding: Embedding,
        output: Output,
        memory_width: int,
        *,
        cell: Cell = "lstm",
        layers: Count = 1,
        width: Count = 256,
        score: type[AttentionScore] = Bilinear,
        order: Literal[0, 1] = 1,
        monotonic: bool = True,
        max_jump: Count = 8,
        dropout: Rate = 0.1,
    ) -> None:
        """`monotonic`: a_t >= a_{t-1} (order 1). `max_jump`: longest jump with a bias of its own."""
        super().__init__()
        self.embedding, self.emission, self.dropout = embedding, output, Dropout(dropout)
        self.rnn = RecurrentStack(embedding.width, width, cell, layers, dropout=dropout)
        self.order, self.monotonic, self.max_jump = order, monotonic, max_jump
        self.bridge = dense(memory_width, layers * width * self.rnn.tensors) if memory_width else None
        self.hidden_proj = dense(width, width)
        if memory_width:
            self.score = check_stateless(score(width, memory_width))
            self.memory_proj = dense(memory_width, width, bias=False)
            if order:
                self.jump_bias = nn.Parameter(torch.zeros(2 * max_jump + 1))

    @property
    def attention_shape(self) -> tuple[int, int]:
        return (1, 1) if self.bridge is not None else (0, 0)

    def start(self, memory: Memory) -> State:
        rows = memory.mask.size(0)
        if self.bridge is None:
            return State({}, {"cells": self.rnn.zeros(rows, self.embedding.weight)})
        keys, projected = self.score.keys(memory.values), self.memory_proj(memory.values)
        past: dict[str, Tree] = {"cells": initial_cells(self.bridge, self.rnn, memory.summary)}
        if self.order:  # before the first token every alignment path is at the first row
            joint = projected.new_full(
                (rows, memory.mask.size(1), self.embedding.size), IMPOSSIBLE, dtype=torch.float32
            )
            joint.narrow(1, 0, 1).zero_()
            past["joint"] = joint  # R S V
        return State({"keys": keys, "projected": projected, "mask": memory.mask}, past)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        hidden, cells = self.rnn(self.dropout(self.embedding(tokens)), state.past["cells"], mask)  # R T W
        past: dict[str, Tree] = {**state.past, "cells": cells}
        if self.bridge is None:
            readout = self.dropout(torch.tanh(self.hidden_proj(hidden)))
            return Step(
                self.emission(readout), replace(state, past=past), Attention() if with_attention else None, readout
            )
        keys, projected, seen = (state.fixed[name] for name in ("keys", "projected", "mask"))
        scores = self.score(hidden.reshape(keys.size(0), -1, hidden.size(-1)), keys).view(*hidden.shape[:2], -1)
        projected, seen = (x.repeat_interleave(state.beams, 0) for x in (projected, seen))
        readout = self.dropout(torch.tanh(self.hidden_proj(hidden)[:, :, None] + projected[:, None]))  # R T S W
        emissions = self.emission(readout).float().log_softmax(-1)  # R T S V
        scores = scores.float().masked_fill(~seen[:, None], IMPOSSIBLE)  # R T S
        if self.order:
            prior, past["joint"] = self._forward_algorithm(tokens, scores, emissions, seen, state.past["joint"], mask)
        else:
            prior = scores.log_softmax(-1)
        weights = prior.exp() * seen[:, None]  # R T S
        logits = torch.logsumexp(prior[..., None] + emissions, 2)  # R T V
        mean = (weights[..., None] * readout).sum(2)  # R T W
        attention = Attention(cross=weights[:, None, None]) if with_attention else None
        return Step(logits, replace(state, past=past), attention, mean)

    def _forward_algorithm(
        self, tokens: Tensor, scores: Tensor, emissions: Tensor, seen: Tensor, joint: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """log p(a_t = s | y_<t) of every step (R T S), and the joint log-probability after the last real token."""
        transitions = self._transitions(scores)  # R T S S
        priors = []
        for step in range(tokens.size(1)):
            chosen = tokens[:, step, None, None].expand(-1, joint.size(1), 1)
            posterior = joint.gather(2, chosen).squeeze(2).log_softmax(-1)  # R S: of the previous alignment
            prior = torch.logsumexp(posterior[:, :, None] + transitions[:, step], 1)  # R S
            prior = prior.masked_fill(~seen, IMPOSSIBLE).log_softmax(-1)
            new = prior[..., None] + emissions[:, step]  # R S V
            joint = new if mask is None else torch.where(mask[:, step, None, None], new, joint)
            priors.append(prior)
        return torch.stack(priors, 1), joint

    def _transitions(self, scores: Tensor) -> Tensor:
        """log p(a_t = s | a_{t-1} = s', s_t), as R T S' S."""
        rows = torch.arange(scores.size(-1), device=scores.device)
        jump = rows[None] - rows[:, None]  # S' S
        bias = self.jump_bias.float()[jump.clamp(-self.max_jump, self.max_jump) + self.max_jump]
        if self.monotonic:
            bias = bias.masked_fill(jump < 0, IMPOSSIBLE)
        return (scores[:, :, None] + bias).log_softmax(-1)
