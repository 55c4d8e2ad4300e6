"""Decoders that sum out their alignment: exact hard attention, and the transducer over edit actions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.scores import Bilinear
from transduce.contracts import AttentionScore, Count, Decoder, Rate
from transduce.errors import InputError
from transduce.flow import EOS, Attention, Memory, State, Step, Tree, masked_mean
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, LayerState, RecurrentStack

IMPOSSIBLE = -1e9  # log-probability; finite, so that sums over impossible alignments have a gradient
COPY, SUBSTITUTE, INSERT, DELETE, END = range(5)


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


def precise(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 where the model computes in it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def at_first_row(memory: Tensor, vocabulary: int) -> Tensor:
    """Log-probabilities (B S V) with which every alignment is at the first row of a memory (B S W)."""
    joint = precise(memory[:, :, :1]).new_full((*memory.shape[:2], vocabulary), IMPOSSIBLE)
    joint.narrow(1, 0, 1).zero_()
    return joint


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
            past["joint"] = at_first_row(projected, self.embedding.size)  # R S V
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
        emissions = precise(self.emission(readout)).log_softmax(-1)  # R T S V
        scores = precise(scores).masked_fill(~seen[:, None], IMPOSSIBLE)  # R T S
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
        bias = precise(self.jump_bias)[jump.clamp(-self.max_jump, self.max_jump) + self.max_jump]
        if self.monotonic:
            bias = bias.masked_fill(jump < 0, IMPOSSIBLE)
        return (scores[:, :, None] + bias).log_softmax(-1)


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

    def logits(self, before: Tensor) -> Tensor:
        """log p(y_t = v), R T V, for log p(row) before the step (R T S)."""
        # The rows are summed out of each kind of action by itself: R T S V tensors are what training costs.
        writes = before + torch.logaddexp(self.actions[..., INSERT], self.actions[..., SUBSTITUTE])
        written = torch.logsumexp(writes[..., None] + self.characters, 2)
        copies, ended = before + self.actions[..., COPY], (before + self.actions[..., END]).logsumexp(2, keepdim=True)
        most = copies.detach().max(2, keepdim=True).values
        copied = self.copied[:, None].expand_as(copies)
        total = torch.zeros_like(written).scatter_add(2, copied, (copies - most).exp())
        possible = total.clamp(min=torch.finfo(total.dtype).tiny).log() + most
        written = torch.logaddexp(written, torch.where(total > 0, possible, IMPOSSIBLE))
        vocabulary = torch.arange(written.size(-1), device=written.device)
        return torch.logaddexp(written, ended.where(vocabulary == EOS, IMPOSSIBLE))

    def at(self, steps: Tensor) -> EditActions:
        """The distributions of one step (R) of each row."""
        rows = torch.arange(len(steps), device=steps.device)
        actions, characters, readout = (x[rows, steps][:, None] for x in (self.actions, self.characters, self.readout))
        return EditActions(actions, characters, readout, self.copied, self.rows)

    def joint(self, before: Tensor) -> Tensor:
        """log p(y_t = v, next row s), R T S V, for log p(row) before the step (R T S)."""
        stay = (before + self.actions[..., INSERT])[..., None] + self.characters
        vocabulary = torch.arange(stay.size(-1), device=stay.device)
        ended = (before + self.actions[..., END])[..., None].masked_fill(vocabulary != EOS, IMPOSSIBLE)
        stay = torch.logaddexp(stay, ended)
        move = (before + self.actions[..., SUBSTITUTE])[..., None] + self.characters
        others = (self.copied[..., None] != vocabulary)[:, None]  # R 1 S V
        copied = (before + self.actions[..., COPY])[..., None].masked_fill(others, IMPOSSIBLE)
        move = torch.logaddexp(move, copied)
        return torch.logaddexp(stay, _next_row(move, 2))


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
        condition_input: bool = False,
        dropout: Rate = 0.1,
    ) -> None:
        """`score`: of the attention c_t over the other sources, or the only one. `copy_action` needs one vocabulary.
        `condition_input`: the mean of these sources is a part of every input of the recurrent layers."""
        super().__init__()
        self.embedding, self.emission, self.dropout = embedding, output, Dropout(dropout)
        self.condition_input = condition_input and memory_width > 0
        read_width = embedding.width + (memory_width if self.condition_input else 0)
        self.rnn = RecurrentStack(read_width, width, cell, layers, dropout=dropout)
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
        rows = memory.mask.size(0)
        if self.bridge is None:
            return State({}, {"cells": self.rnn.zeros(rows, self.embedding.weight)})
        edited, others = memory.mask, memory.mask
        if memory.source_ids is not None:
            edited, others = edited & (memory.source_ids == 0), others & (memory.source_ids != 0)
        allowed = self._allowed(edited, memory.tokens)
        # Other rows may have tokens that the target vocabulary lacks.
        copied = torch.zeros_like(edited, dtype=torch.long)
        if memory.tokens is not None:
            copied = memory.tokens.where(allowed[..., COPY], copied)
        fixed: dict[str, Tree] = {
            "keys": self.score.keys(memory.values),
            "values": self.context_proj(memory.values),
            "projected": self.memory_proj(memory.values),
            "edited": edited,
            "others": others,
            "allowed": allowed,
            "tokens": copied,
        }
        if self.condition_input:
            fixed["condition"] = masked_mean(memory.values, others)
        joint = at_first_row(fixed["projected"], self.embedding.size)  # where the pointer is before the first token
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
        last = torch.full_like(tokens[:, 0], tokens.size(1) - 1) if mask is None else mask.sum(1) - 1
        before_last = before[torch.arange(len(last), device=last.device), last]  # R S
        past["joint"] = edits.at(last).joint(before_last[:, None])[:, 0]  # R S V
        writes = before + torch.log1p(-edits.actions[..., DELETE].exp().clamp(max=1 - 1e-7))
        weights = writes.masked_fill(~edits.rows[:, None], -torch.inf).softmax(-1)  # R T S
        mean = (weights[:, :, None].to(edits.readout) @ edits.readout)[:, :, 0]  # R T W
        attention = Attention(cross=weights[:, None, None]) if with_attention else None
        return Step(edits.logits(before), replace(state, past=past), attention, mean)

    def read(self, tokens: Tensor, state: State, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """The hidden states of the target (R T W) after each of these tokens, and the state after all of them."""
        read = self.dropout(self.embedding(tokens))
        if self.condition_input:
            condition = state.fixed["condition"].repeat_interleave(state.beams, 0)[:, None]
            read = torch.cat((read, condition.expand(-1, tokens.size(1), -1)), -1)
        hidden, cells = self.rnn(read, state.past["cells"], mask)
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
        weights = precise(scores).masked_fill(~others[:, None], IMPOSSIBLE).softmax(-1).to(values)
        context: Tensor = self.hidden_proj(hidden) + weights @ values
        return context

    def _distributions(self, readout: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the actions (... 5) and of the character that is written (... V)."""
        actions = precise(self.action_proj(readout)).masked_fill(~allowed, IMPOSSIBLE).log_softmax(-1)
        characters = precise(self.emission(readout))
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
