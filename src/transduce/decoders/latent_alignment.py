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
from transduce.kernels.linear import uncast_matmul
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.option_groups import flat_options
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


def at_first_row(memory: Tensor) -> Tensor:
    """Log-probabilities (B S) with which every alignment is at the first row of a memory (B S W)."""
    rows = precise(memory[:, :, 0]).new_full(memory.shape[:2], IMPOSSIBLE)
    rows.narrow(1, 0, 1).zero_()
    return rows


def exp_shifted(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logits - most), and the largest logit of each row, which is a constant of the gradient."""
    most = logits.detach().amax(-1, keepdim=True)
    return (logits - most).exp(), most


def beside(rows: Tensor, memory: Tensor) -> Tensor:
    """The rows (R T W) of all beams of a source as one row (B NT W): so no memory (B S W) is repeated for beams."""
    return rows.reshape(len(memory), -1, rows.size(-1))


def mixture(weights: Tensor, distributions: Tensor) -> Tensor:
    """sum over s of p(s) x(s), R T V, for p(s), R T S, and numbers of each row s, R T S V."""
    # One matrix product; a sum of exponentials passes R T S V numbers several times.
    return uncast_matmul(weights[:, :, None], distributions)[:, :, 0]


def log_of(probabilities: Tensor) -> Tensor:
    """Logarithms. A probability that underflows has the logarithm of the smallest number, so that losses are finite."""
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def of_tokens(distributions: Tensor, tokens: Tensor) -> Tensor:
    """log p(y_t | s), R T S, of the tokens (R T) in distributions over the vocabulary, R T S V."""
    index = tokens[..., None, None].expand(*distributions.shape[:3], 1)
    return log_of(distributions.gather(-1, index).squeeze(-1))


def at_last_step(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values (R T ...) of the last real step of each row."""
    if mask is None:
        return values[:, -1]
    return values[torch.arange(len(values), device=values.device), mask.sum(1) - 1]


@dataclass(frozen=True)
class TransitionOptions:
    """The options of p(a_t | a_{t-1}, s_t), the transition between the alignments of two tokens."""

    order: Literal[0, 1] = 1  # 0: a_t does not depend on a_{t-1}, and the others have no effect
    monotonic: bool = True  # a_t >= a_{t-1}
    max_jump: Count = 8  # the longest jump with a bias of its own

    def log_probabilities(self, scores: Tensor, jump_bias: Tensor) -> Tensor:
        """log p(a_t = s | a_{t-1} = s', s_t), as R T S' S, for the scores of rows, R T S, and 2 J + 1 biases."""
        rows = torch.arange(scores.size(-1), device=scores.device)
        jump = rows[None] - rows[:, None]  # S' S
        bias = precise(jump_bias)[jump.clamp(-self.max_jump, self.max_jump) + self.max_jump]
        if self.monotonic:
            bias = bias.masked_fill(jump < 0, IMPOSSIBLE)
        return (scores[:, :, None] + bias).log_softmax(-1)


class HardAttentionDecoder(Decoder):
    """p(y_t) = sum over s of p(a_t = s) p(y_t | s_t, h_s), exactly (Wu, Shapiro & Cotterell 2018; Wu & Cotterell 2019)

    The recurrent state s_t reads target tokens alone, so it does not depend on the alignment. Order 0: a_t depends on
    s_t. Order 1: on a_{t-1} too; the state then holds p(a_t = s | y_<t) and p(y_t = v | a_t = s) for every s and v,
    from which the next token selects the posterior of a_t. The logits are log-probabilities. Time and memory grow with
    source length x vocabulary, which suits characters and phones.

    With `emission: product`, p(y_t | s_t, h_s) is a product of two experts (Hinton 2002), proportional to
    exp(f(s_t)) exp(g(h_s)): one knows the words before, the other one row. Then the sum over s, and the sums that
    normalise each product, are matrix products, which suits words too (order 0).
    """

    constant_state = True

    @flat_options
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
        transitions: TransitionOptions,
        emission: Literal["joint", "product"] = "joint",
        initial: Literal["summary", "zero"] = "summary",
        dropout: Rate = 0.1,
    ) -> None:
        """`emission`: of s_t and h_s together, or their product. `initial`: the recurrent state begins with the summary
        of the memory, or, so that it knows of the source only what was written, with zeros."""
        super().__init__()
        self.embedding, self.emission, self.dropout = embedding, output, Dropout(dropout)
        self.rnn = RecurrentStack(embedding.width, width, cell, layers, dropout=dropout)
        self.transitions = transitions
        self.has_memory, self.factorised = memory_width > 0, emission == "product"
        if self.factorised and transitions.order:
            raise InputError("a product of experts is summed over alignments of order 0", remedy="set order: 0")
        has_bridge = self.has_memory and initial == "summary"
        self.bridge = dense(memory_width, layers * width * self.rnn.tensors) if has_bridge else None
        self.hidden_proj = dense(width, width)
        if memory_width:
            self.score = check_stateless(score(width, memory_width))
            self.memory_proj = dense(memory_width, width, bias=False)
            if self.factorised:  # no row prefers a word yet: training begins with a language model
                self.memory_proj.weight.data.mul_(0.1)
            if transitions.order:
                self.jump_bias = nn.Parameter(torch.zeros(2 * transitions.max_jump + 1))

    @property
    def attention_shape(self) -> tuple[int, int]:
        return (1, 1) if self.has_memory else (0, 0)

    def start(self, memory: Memory) -> State:
        rows = memory.mask.size(0)
        cells = self.rnn.zeros(rows, self.embedding.weight)
        if not self.has_memory:
            return State({}, {"cells": cells})
        keys, projected = self.score.keys(memory.values), self.memory_proj(memory.values)
        if self.bridge is not None:
            cells = initial_cells(self.bridge, self.rnn, memory.summary)
        past: dict[str, Tree] = {"cells": cells}
        fixed: dict[str, Tree] = {"keys": keys, "projected": projected, "mask": memory.mask}
        if self.factorised:
            fixed["expert"] = exp_shifted(precise(self.emission(projected)))[0]  # B S V
        if self.transitions.order:
            # Before the first token every alignment path is at the first row, whatever that token is.
            past["prior"] = at_first_row(projected)  # R S
            past["emissions"] = past["prior"].new_ones(*past["prior"].shape, self.embedding.size)  # R S V
        return State(fixed, past)

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        hidden, cells = self.rnn(self.dropout(self.embedding(tokens)), state.past["cells"], mask)  # R T W
        past: dict[str, Tree] = {**state.past, "cells": cells}
        if not self.has_memory:
            readout = self.dropout(torch.tanh(self.hidden_proj(hidden)))
            return Step(
                self.emission(readout), replace(state, past=past), Attention() if with_attention else None, readout
            )
        scores = self._scores(hidden, state)
        if self.factorised:
            prior = scores.log_softmax(-1)
            weights = prior.exp()  # R T S
            logits, mean = self._product_of_experts(hidden, weights, state)
        else:
            readout, emissions = self._emissions(hidden, state)
            prior = self._prior(tokens, scores, emissions, state)
            weights = prior.exp()
            logits, mean = log_of(mixture(weights, emissions)), mixture(weights.to(readout), readout)  # R T V, R T W
            if self.transitions.order:
                past |= {"prior": at_last_step(prior, mask), "emissions": at_last_step(emissions, mask)}
        attention = Attention(cross=weights[:, None, None]) if with_attention else None
        return Step(logits, replace(state, past=past), attention, mean)

    def posterior(self, tokens: Tensor, state: State, outputs: Tensor) -> Tensor | None:
        """p(a_t = s | y_t, y_<t), R T S: the prior times p(y_t | s_t, h_s), as shares (Shankar & Sarawagi 2019)."""
        if not self.has_memory:
            return None
        hidden, _ = self.rnn(self.dropout(self.embedding(tokens)), state.past["cells"])
        scores = self._scores(hidden, state)
        if self.factorised:
            totals = self._language_expert(hidden, state)[1]
            expert = state.fixed["expert"].mT  # B V S
            chosen = beside(outputs[..., None], expert).expand(-1, -1, expert.size(-1))
            joint = scores.log_softmax(-1) + log_of(expert.gather(1, chosen).view_as(totals)) - totals.log()
        else:
            emissions = self._emissions(hidden, state)[1]
            joint = self._prior(tokens, scores, emissions, state) + of_tokens(emissions, outputs)
        seen = state.fixed["mask"].repeat_interleave(state.beams, 0)
        return joint.masked_fill(~seen[:, None], IMPOSSIBLE).softmax(-1)

    def _scores(self, hidden: Tensor, state: State) -> Tensor:
        """The score of each row of the memory, impossible under the mask, R T S."""
        keys, seen = state.fixed["keys"], state.fixed["mask"]
        scores = precise(self.score(beside(hidden, keys), keys)).masked_fill(~seen[:, None], IMPOSSIBLE)
        return scores.view(*hidden.shape[:2], -1)

    def _emissions(self, hidden: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The readout of each row of the memory (R T S W), and p(y_t | s_t, h_s), R T S V."""
        projected = state.fixed["projected"]
        queries = beside(self.hidden_proj(hidden), projected)
        readout = self.dropout(torch.tanh(queries[:, :, None] + projected[:, None]))
        readout = readout.view(*hidden.shape[:2], *readout.shape[2:])
        return readout, precise(self.emission(readout)).softmax(-1)

    def _product_of_experts(self, hidden: Tensor, weights: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """log p(y_t), R T V, and the mean readout, R T W, for p(a_t = s), R T S."""
        language, totals, most, readout = self._language_expert(hidden, state)
        expert, projected = state.fixed["expert"], state.fixed["projected"]
        mixed = uncast_matmul(beside(weights / totals, expert), expert)  # B NT V
        logits = log_of(mixed).view_as(language) + language - most
        values = beside(weights.to(readout), projected) @ projected
        return logits, readout + values.view_as(readout)

    def _language_expert(self, hidden: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """f(s_t), R T V; sum over v of exp(f - most) times the expert of each row, R T S; the most; the readout."""
        readout = self.dropout(self.hidden_proj(hidden))
        language = precise(self.emission(readout))
        relative, most = exp_shifted(language)
        expert = state.fixed["expert"]
        totals = uncast_matmul(beside(relative, expert), expert.mT).view(*hidden.shape[:2], -1)
        return language, totals.clamp(min=torch.finfo(totals.dtype).tiny), most, readout

    def _prior(self, tokens: Tensor, scores: Tensor, emissions: Tensor, state: State) -> Tensor:
        """log p(a_t = s | y_<t) of every step, R T S; of order 1 by the forward algorithm."""
        if not self.transitions.order:
            return scores.log_softmax(-1)
        seen = state.fixed["mask"].repeat_interleave(state.beams, 0)
        transitions = self.transitions.log_probabilities(scores, self.jump_bias)  # R T S S
        written = of_tokens(state.past["emissions"][:, None], tokens[:, :1])
        if tokens.size(1) > 1:
            written = torch.cat((written, of_tokens(emissions[:, :-1], tokens[:, 1:])), 1)  # R T S: of each token read
        prior, priors = state.past["prior"], list[Tensor]()
        for step in range(tokens.size(1)):
            posterior = (prior + written[:, step]).log_softmax(-1)  # R S: of the previous alignment
            prior = torch.logsumexp(posterior[:, :, None] + transitions[:, step], 1)  # R S
            prior = prior.masked_fill(~seen, IMPOSSIBLE).log_softmax(-1)
            priors.append(prior)
        return torch.stack(priors, 1)


@dataclass(frozen=True)
class EditActions:
    """The distributions over actions of every step t with the pointer at every source row s."""

    actions: Tensor  # R T S 5: log-probabilities
    characters: Tensor  # R T S V: probabilities of the character that is inserted or substituted
    copied: Tensor  # R S: the token of each source row

    def emission(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """log p of writing the tokens (R T), staying at a row or going to the next; both R T S."""
        actions, written = self.actions, of_tokens(self.characters, tokens)
        ended = actions[..., END].masked_fill((tokens != EOS)[..., None], IMPOSSIBLE)
        stay = torch.logaddexp(actions[..., INSERT] + written, ended)
        copied = actions[..., COPY].masked_fill(tokens[..., None] != self.copied[:, None], IMPOSSIBLE)
        move = torch.logaddexp(actions[..., SUBSTITUTE] + written, copied)
        return stay, move

    def paths(self, before: Tensor) -> Tensor:
        """p(row, action), R T S 5, for log p(row) before the step (R T S); deletions are none: they are before it."""
        # The last row cannot be deleted, so the probabilities of all writing actions add up to 1.
        deletions = torch.arange(END + 1, device=before.device) == DELETE
        return (before[..., None] + self.actions).exp().masked_fill(deletions, 0.0)

    def logits(self, paths: Tensor) -> Tensor:
        """log p(y_t = v), R T V, for p(row, action)."""
        total = mixture(paths[..., INSERT] + paths[..., SUBSTITUTE], self.characters)
        total = total.scatter_add(2, self.copied[:, None].expand(paths.shape[:3]), paths[..., COPY])
        ended = paths[..., END].sum(2, keepdim=True)
        return log_of(total.scatter_add(2, torch.full_like(ended, EOS, dtype=torch.long), ended))


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
        editable = slice(memory.first_source_rows)  # the pointer never reaches rows of other sources
        fixed: dict[str, Tree] = {
            "keys": self.score.keys(memory.values),
            "values": self.context_proj(memory.values),
            "projected": self.memory_proj(memory.values[:, editable]),
            "edited": edited,
            "others": others,
            "allowed": allowed[:, editable],
            "tokens": copied[:, editable],
        }
        if self.condition_input:
            fixed["condition"] = masked_mean(memory.values, others)
        before = at_first_row(fixed["projected"])  # R S: where the pointer is before the first token,
        actions = before.new_full((*before.shape, END + 1), IMPOSSIBLE)
        actions.narrow(-1, INSERT, 1).zero_()  # which stays there,
        characters = before.new_ones(*before.shape, self.embedding.size)  # whatever that token is
        past = {"before": before, "actions": actions, "characters": characters}
        return State(fixed, {"cells": initial_cells(self.bridge, self.rnn, memory.summary), **past})

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
        edits, readout = self.edit_actions(hidden, state)
        before = self._pointers(tokens, edits, state)  # R T S
        now = {"before": before, "actions": edits.actions, "characters": edits.characters}
        past |= {name: at_last_step(values, mask) for name, values in now.items()}
        paths = edits.paths(before)  # R T S 5
        weights = paths.sum(-1)
        weights = weights / weights.sum(-1, keepdim=True)  # R T S
        mean = mixture(weights.to(readout), readout)  # R T W
        others = state.fixed["edited"].size(1) - weights.size(-1)
        attention = Attention(cross=F.pad(weights, (0, others))[:, None, None]) if with_attention else None
        return Step(edits.logits(paths), replace(state, past=past), attention, mean)

    def read(self, tokens: Tensor, state: State, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """The hidden states of the target (R T W) after each of these tokens, and the state after all of them."""
        read = self.dropout(self.embedding(tokens))
        if self.condition_input:
            condition = state.fixed["condition"].repeat_interleave(state.beams, 0)[:, None]
            read = torch.cat((read, condition.expand(-1, tokens.size(1), -1)), -1)
        hidden, cells = self.rnn(read, state.past["cells"], mask)
        return hidden, replace(state, past={**state.past, "cells": cells})

    def edit_actions(self, hidden: Tensor, state: State) -> tuple[EditActions, Tensor]:
        """The distributions over actions for the hidden states (R T W) of the target, and what they follow from."""
        projected, allowed = state.fixed["projected"], state.fixed["allowed"]
        context = beside(self._context(hidden, state), projected)
        readout = self.dropout(torch.tanh(context[:, :, None] + projected[:, None]))  # B NT S W
        scores = self._scores(readout, allowed[:, None])
        shape = (*hidden.shape[:2], projected.size(1), -1)
        actions, characters = scores[0].log_softmax(-1).view(shape), scores[1].softmax(-1).view(shape)
        tokens = state.fixed["tokens"].repeat_interleave(state.beams, 0)
        return EditActions(actions, characters, tokens), readout.view(shape)

    def actions_at(self, hidden: Tensor, rows: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The log-probabilities of actions (R K 5) and characters (R K V) for K states of each row alone.

        They have hidden states (R K W) and pointers (R K).
        """
        projected, allowed = (
            state.fixed[name].gather(1, rows[..., None].expand(-1, -1, state.fixed[name].size(-1)))
            for name in ("projected", "allowed")
        )
        scores = self._scores(self.dropout(torch.tanh(self._context(hidden, state) + projected)), allowed)
        return scores[0].log_softmax(-1), scores[1].log_softmax(-1)

    def _context(self, hidden: Tensor, state: State) -> Tensor:
        """U s_t + Z c_t, R T W"""
        keys, values, others = (state.fixed[name] for name in ("keys", "values", "others"))
        scores = precise(self.score(beside(hidden, keys), keys)).masked_fill(~others[:, None], IMPOSSIBLE)  # B NT S
        context: Tensor = self.hidden_proj(hidden) + (scores.softmax(-1).to(values) @ values).view_as(hidden)
        return context

    def _scores(self, readout: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the actions (... 5) and of the character that is written (... V)."""
        actions = precise(self.action_proj(readout)).masked_fill(~allowed, IMPOSSIBLE)
        characters = precise(self.emission(readout))
        ends = torch.arange(characters.size(-1), device=characters.device) == EOS  # END writes it
        return actions, characters.masked_fill(ends, IMPOSSIBLE)

    def _pointers(self, tokens: Tensor, edits: EditActions, state: State) -> Tensor:
        """log p(row | y_<t) after the deletions before each token is written, R T S."""
        before, actions, characters = (state.past[name] for name in ("before", "actions", "characters"))
        last = replace(edits, actions=actions[:, None], characters=characters[:, None])
        stay, move = last.emission(tokens[:, :1])  # of each token that is read
        if tokens.size(1) > 1:
            earlier = replace(edits, actions=edits.actions[:, :-1], characters=edits.characters[:, :-1])
            more = earlier.emission(tokens[:, 1:])
            stay, move = (torch.cat(both, 1) for both in zip((stay, move), more, strict=True))
        befores = []
        for step in range(tokens.size(1)):
            new = torch.logaddexp(before + stay[:, step], _next_row(before + move[:, step], 1))
            before = _after_deletions(new.log_softmax(-1), edits.actions[:, step, :, DELETE])
            befores.append(before)
        return torch.stack(befores, 1)


def _after_deletions(pointer: Tensor, delete: Tensor) -> Tensor:
    """log of the sum over s' <= s of p(s') p(delete at s') ... p(delete at s - 1), R S."""
    passed = F.pad(delete.cumsum(-1)[:, :-1], (1, 0))  # log p(all rows before s are deleted)
    return torch.logcumsumexp(pointer - passed, -1) + passed
