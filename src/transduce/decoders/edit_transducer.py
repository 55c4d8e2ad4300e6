"""Neural transducer over edit actions: copy, substitute, insert, delete; the alignment is summed out exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.attention.scores import Bilinear
from transduce.contracts import AttentionScore, Count, Decoder, Rate
from transduce.decoders.hard_attention import IMPOSSIBLE, check_stateless, initial_cells
from transduce.flow import EOS, Attention, Memory, State, Step, Tree
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, RecurrentStack

COPY, SUBSTITUTE, INSERT, DELETE, END = range(5)


@dataclass(frozen=True)
class EditActions:
    """Log-probabilities of the actions of every step t with the pointer at every source row s."""

    actions: Tensor  # R T S 5
    characters: Tensor  # R T S V: of the character that is inserted or substituted
    readout: Tensor  # R T S W
    copied: Tensor  # R S: the token of each source row
    rows: Tensor  # R S: the rows of the source that is edited

    def emission(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """log p of writing the tokens (R T) of the first steps, staying at a row or going to the next; both R T S."""
        characters, actions = self.characters[:, : tokens.size(1)], self.actions[:, : tokens.size(1)]
        written = characters.gather(-1, tokens[..., None, None].expand(*characters.shape[:3], 1)).squeeze(-1)
        ended = actions[..., END].masked_fill((tokens != EOS)[..., None], IMPOSSIBLE)
        stay = torch.logaddexp(actions[..., INSERT] + written, ended)
        copied = actions[..., COPY].masked_fill(tokens[..., None] != self.copied[:, None], IMPOSSIBLE)
        move = torch.logaddexp(actions[..., SUBSTITUTE] + written, copied)
        return stay, move

    def logits(self, before: Tensor) -> tuple[Tensor, Tensor]:
        """log p(y_t = v) (R T V), and log p(y_t = v, next row s) (R T S V), for log p(row) before the step (R T S)."""
        stay = (before + self.actions[..., INSERT])[..., None] + self.characters
        vocabulary = torch.arange(stay.size(-1), device=stay.device)
        ended = (before + self.actions[..., END])[..., None].masked_fill(vocabulary != EOS, IMPOSSIBLE)
        stay = torch.logaddexp(stay, ended)
        move = (before + self.actions[..., SUBSTITUTE])[..., None] + self.characters
        others = (self.copied[..., None] != vocabulary)[:, None]  # R 1 S V
        copied = (before + self.actions[..., COPY])[..., None].masked_fill(others, IMPOSSIBLE)
        move = torch.logaddexp(move, copied)
        joint = torch.logaddexp(stay, _next_row(move, 2))
        return joint.logsumexp(2), joint


def _next_row(values: Tensor, axis: int) -> Tensor:
    """The values of each row moved to the next one; the first row becomes impossible."""
    first = torch.full_like(values.narrow(axis, 0, 1), IMPOSSIBLE)
    return torch.cat((first, values.narrow(axis, 0, values.size(axis) - 1)), axis)


class EditTransducerDecoder(Decoder):
    """p(y) = sum over edit scripts: copy, substitute, insert, delete, end (Makarov & Clematide 2018; Yu et al. 2016)

    A pointer goes over the rows of the first source. An action depends on the row h_s under it, on the target so far
    and on the other sources: softmax(W tanh(U s_t + V h_s + Z c_t)). COPY, SUBSTITUTE and DELETE move the pointer to
    the next row, INSERT and END do not; the last row, </s>, allows INSERT and END alone. The recurrent state s_t reads
    the target, not the actions, so the sum over all scripts is exact. The logits are log-probabilities. Time and memory
    grow with source length x vocabulary, which suits characters and phones.
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
        copy_action: bool = True,
        substitute_action: bool = True,
        dropout: Rate = 0.1,
    ) -> None:
        """`score`: of the attention c_t over the other sources, or the only one. `copy_action` needs one vocabulary."""
        super().__init__()
        self.embedding, self.emission, self.dropout = embedding, output, Dropout(dropout)
        self.rnn = RecurrentStack(embedding.width, width, cell, layers, dropout=dropout)
        self.copy_action, self.substitute_action = copy_action, substitute_action
        self.bridge = dense(memory_width, layers * width * self.rnn.tensors) if memory_width else None
        self.hidden_proj = dense(width, width)
        if memory_width:
            self.score = check_stateless(score(width, memory_width))
            self.memory_proj = dense(memory_width, width, bias=False)
            self.context_proj = dense(memory_width, width, bias=False)
            self.action_proj = dense(width, END + 1)

    @property
    def attention_shape(self) -> tuple[int, int]:
        return (1, 1) if self.bridge is not None else (0, 0)

    def start(self, memory: Memory) -> State:
        rows, length = memory.mask.shape
        if self.bridge is None:
            return State({}, {"cells": self.rnn.zeros(rows, self.embedding.weight)})
        edited, others = memory.mask, memory.mask
        if memory.source_ids is not None:
            edited, others = edited & (memory.source_ids == 0), others & (memory.source_ids != 0)
        tokens = memory.tokens
        fixed: dict[str, Tree] = {
            "keys": self.score.keys(memory.values),
            "values": self.context_proj(memory.values),
            "projected": self.memory_proj(memory.values),
            "edited": edited,
            "others": others,
            "allowed": self._allowed(edited, tokens),
            "tokens": torch.zeros_like(edited, dtype=torch.long) if tokens is None else tokens,
        }
        joint = fixed["projected"].new_full((rows, length, self.embedding.size), IMPOSSIBLE, dtype=torch.float32)
        joint.narrow(1, 0, 1).zero_()  # before the first token the pointer is at the first row
        return State(fixed, {"cells": initial_cells(self.bridge, self.rnn, memory.summary), "joint": joint})

    def memory_mask(self, state: State) -> Tensor | None:
        return state.fixed.get("edited")

    def _allowed(self, edited: Tensor, tokens: Tensor | None) -> Tensor:
        """B S 5: the actions that each row allows."""
        last = edited & (edited.sum(1, keepdim=True) == edited.cumsum(1))
        inner = edited & ~last
        copies = inner & (tokens > EOS) if self.copy_action and tokens is not None else torch.zeros_like(inner)
        substitutes = inner if self.substitute_action else torch.zeros_like(inner)
        return torch.stack((copies, substitutes, torch.ones_like(inner), inner, last), -1)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        hidden, read = self.read(tokens, state, mask)
        past: dict[str, Tree] = dict(read.past)
        if self.bridge is None:
            readout = self.dropout(torch.tanh(self.hidden_proj(hidden)))
            return Step(
                self.emission(readout), replace(state, past=past), Attention() if with_attention else None, readout
            )
        edits = self.edit_actions(hidden, state)
        before = self._pointers(tokens, edits, state.past["joint"])  # R T S
        logits, joint = edits.logits(before)
        last = torch.full_like(tokens[:, 0], tokens.size(1) - 1) if mask is None else mask.sum(1) - 1
        past["joint"] = joint[torch.arange(len(last), device=last.device), last]  # R S V
        writes = before + torch.log1p(-edits.actions[..., DELETE].exp().clamp(max=1 - 1e-7))
        weights = writes.masked_fill(~edits.rows[:, None], -torch.inf).softmax(-1)  # R T S
        mean = (weights[..., None] * edits.readout).sum(2)  # R T W
        attention = Attention(cross=weights[:, None, None]) if with_attention else None
        return Step(logits, replace(state, past=past), attention, mean)

    def read(self, tokens: Tensor, state: State, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """The hidden states of the target (R T W) after each of these tokens, and the state after all of them."""
        hidden, cells = self.rnn(self.dropout(self.embedding(tokens)), state.past["cells"], mask)
        return hidden, replace(state, past={**state.past, "cells": cells})

    def edit_actions(self, hidden: Tensor, state: State) -> EditActions:
        """The distributions over actions for the hidden states (R T W) of the target."""
        projected, edited, allowed, tokens = (
            state.fixed[name].repeat_interleave(state.beams, 0) for name in ("projected", "edited", "allowed", "tokens")
        )
        readout = self.dropout(torch.tanh(self._context(hidden, state)[:, :, None] + projected[:, None]))  # R T S W
        return EditActions(*self._distributions(readout, allowed[:, None]), readout, tokens, edited)

    def actions_at(self, hidden: Tensor, rows: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The same (R K 5, R K V) for K states of each row alone: hidden states (R K W) and pointers (R K)."""
        projected, allowed = (
            state.fixed[name].gather(1, rows[..., None].expand(-1, -1, state.fixed[name].size(-1)))
            for name in ("projected", "allowed")
        )
        return self._distributions(self.dropout(torch.tanh(self._context(hidden, state) + projected)), allowed)

    def _context(self, hidden: Tensor, state: State) -> Tensor:
        """U s_t + Z c_t, R T W"""
        keys = state.fixed["keys"]
        scores = self.score(hidden.reshape(keys.size(0), -1, hidden.size(-1)), keys).view(*hidden.shape[:2], -1)
        values, others = (state.fixed[name].repeat_interleave(state.beams, 0) for name in ("values", "others"))
        weights = scores.float().masked_fill(~others[:, None], IMPOSSIBLE).softmax(-1).to(values)
        context: Tensor = self.hidden_proj(hidden) + weights @ values
        return context

    def _distributions(self, readout: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the actions (... 5) and of the character that is written (... V)."""
        actions = self.action_proj(readout).float().masked_fill(~allowed, IMPOSSIBLE).log_softmax(-1)
        characters = self.emission(readout).float()
        ends = torch.arange(characters.size(-1), device=characters.device) == EOS  # END writes it
        return actions, characters.masked_fill(ends, IMPOSSIBLE).log_softmax(-1)

    def _pointers(self, tokens: Tensor, edits: EditActions, joint: Tensor) -> Tensor:
        """log p(row | y_<t) after the deletions before each token is written, R T S."""
        stay, move = edits.emission(tokens[:, 1:])  # of the token after each step but the last
        chosen = tokens[:, :1, None].expand(-1, joint.size(1), 1)
        pointer = joint.gather(2, chosen).squeeze(2).log_softmax(-1)  # R S
        befores = []
        for step in range(tokens.size(1)):
            before = _after_deletions(pointer, edits.actions[:, step, :, DELETE])
            befores.append(before)
            if step < tokens.size(1) - 1:
                new = torch.logaddexp(before + stay[:, step], _next_row(before + move[:, step], 1))
                pointer = new.log_softmax(-1)
        return torch.stack(befores, 1)


def _after_deletions(pointer: Tensor, delete: Tensor) -> Tensor:
    """log of the sum over s' <= s of p(s') p(delete at s') ... p(delete at s - 1), R S."""
    passed = F.pad(delete.cumsum(-1)[:, :-1], (1, 0))  # log p(all rows before s are deleted)
    return torch.logcumsumexp(pointer - passed, -1) + passed
