"""Recurrent decoder, and its context mechanisms: initial state, every step, Bahdanau and Luong attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.attention.multihead import Attend
from transduce.attention.scores import MLP, Bilinear, Softmax
from transduce.contracts import (
    AttentionPart,
    AttentionScore,
    ContextMechanism,
    ContextOutput,
    Count,
    Decoder,
    Normaliser,
    Rate,
    Window,
    WindowMask,
)
from transduce.errors import InputError
from transduce.flow import Attention, Memory, State, Step, Tree, map_tensors
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, LayerState, RecurrentStack, StepwiseRecurrence

Cells = tuple[LayerState, ...]
Run = Callable[
    [Tensor | None, Cells], tuple[Tensor, Cells]
]  # additional input (R T F) and the state -> hidden states (R T W) and the next state


class InitialContext(ContextMechanism):
    """the summary as the initial state alone: s_0 = dense(h_T) (Sutskever 2014)"""

    def __init__(self, width: int, memory_width: int) -> None:
        super().__init__()
        self.output_width = width

    def step_output(
        self, hidden: Tensor, fed: ContextOutput | None, state: State, with_attention: bool
    ) -> ContextOutput:
        return ContextOutput(hidden, {})


class EveryStepContext(ContextMechanism):
    """the summary as input of every step: s_t = f(y_{t-1}, s_{t-1}, c) (Cho 2014)"""

    def __init__(self, width: int, memory_width: int) -> None:
        super().__init__()
        self.feed_width, self.output_width = memory_width, width + memory_width

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        return {"summary": memory.summary}, {}

    def step_input(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> ContextOutput:
        summary = state.fixed["summary"]
        every_row = summary.repeat_interleave(state.beams, 0)[:, None].expand(-1, steps, -1)  # R T D
        return ContextOutput(every_row, {})

    def step_output(
        self, hidden: Tensor, fed: ContextOutput | None, state: State, with_attention: bool
    ) -> ContextOutput:
        assert fed is not None
        return ContextOutput(torch.cat((hidden, fed.output), -1), {})


class AttentionContext(ContextMechanism):
    """Base of the attention mechanisms: keys are computed once per source, and beams are query rows.

    The history of each stateful part is stored under its name; then tokens are processed one at a time.
    """

    has_attention = True

    def __init__(
        self,
        width: int,
        memory_width: int,
        score: type[AttentionScore],
        normaliser: type[Normaliser],
        window: Window | None,
    ) -> None:
        super().__init__()
        self.attend = Attend(score(width, memory_width), normaliser(), carries_past=True)
        self.window = window
        self.stateful = self.attend.stateful or (window is not None and window.stateful)

    def _parts(self) -> dict[str, AttentionPart]:
        parts: dict[str, AttentionPart] = {"score": self.attend.score, "normaliser": self.attend.normaliser}
        return parts if self.window is None else {**parts, "window": self.window}

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        fixed = {"keys": self.attend.keys(memory.values), "values": memory.values, "mask": memory.mask}
        history = {name: part.start(memory.mask) for name, part in self._parts().items()}
        return fixed, {"history": history} if self.stateful else {}

    def read(self, query: Tensor, state: State, with_attention: bool) -> ContextOutput:
        """query (R T D) -> context (R T D), weights (R T S), their entropy (R T), and the next history."""
        keys, values, mask = state.fixed["keys"], state.fixed["values"], state.fixed["mask"]
        rows, steps, width = query.shape
        query = query.reshape(keys.size(0), -1, width)  # B N*T D
        if not self.stateful:
            window = self._window(query, mask, {})
            context, weights = self.attend(query, keys, values, window.mask, window.bias, with_attention=with_attention)
            output = ContextOutput(context.reshape(rows, steps, -1), {})
            if weights is None:
                return output
            entropy = self.attend.entropy(query, keys, window.mask, window.bias)
            entropy = None if entropy is None else entropy.reshape(rows, steps)
            return replace(output, weights=weights.reshape(rows, steps, -1), entropy=entropy)
        assert steps == 1, "stateful attention takes one step at a time"
        past = state.past["context"]["history"]
        history = map_tensors(lambda x: x.unflatten(0, (keys.size(0), -1)), past)  # B N ...
        window = self._window(query, mask, history)
        context, weights = self.attend.stateful_forward(query, keys, values, window.mask, window.bias, history)
        weights = weights.flatten(0, 1)  # R S
        used = self.attend.used(weights)
        past = {name: part.update(past[name], used) for name, part in self._parts().items()}
        output = ContextOutput(context.reshape(rows, 1, -1), {"history": past})
        if not with_attention:
            return output
        entropy = self.attend.entropy(query, keys, window.mask, window.bias, history)
        entropy = None if entropy is None else entropy.reshape(rows, 1)
        return replace(output, weights=weights[:, None], entropy=entropy)

    def _window(self, query: Tensor, mask: Tensor, history: dict[str, Tree]) -> WindowMask:
        """The rows that each query (B N*T D) may attend to: all unpadded ones (B S) without a window."""
        if self.window is None:
            return WindowMask(mask[:, None])
        window: WindowMask = self.window(query, mask[:, None], history.get("window"))
        return window


class Bahdanau(AttentionContext):
    """attention with the previous state; the context is an input: s_t = f(y_{t-1}, s_{t-1}, c_t) (Bahdanau 2015)"""

    stepwise = True

    def __init__(
        self,
        width: int,
        memory_width: int,
        *,
        score: type[AttentionScore] = MLP,
        normaliser: type[Normaliser] = Softmax,
        window: type[Window] | None = None,
    ) -> None:
        super().__init__(width, memory_width, score, normaliser, None if window is None else window(width))
        self.feed_width, self.output_width = memory_width, width + memory_width

    def step_input(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> ContextOutput:
        return self.read(hidden[:, None], state, with_attention)

    def step_output(
        self, hidden: Tensor, fed: ContextOutput | None, state: State, with_attention: bool
    ) -> ContextOutput:
        assert fed is not None
        return replace(fed, output=torch.cat((hidden, fed.output), -1))


class Luong(AttentionContext):
    """attention with the new state: f(W [c_t; s_t]), optionally an input of the next step (Luong 2015)"""

    def __init__(
        self,
        width: int,
        memory_width: int,
        *,
        score: type[AttentionScore] = Bilinear,
        normaliser: type[Normaliser] = Softmax,
        window: type[Window] | None = None,
        input_feeding: bool = True,
        bias: bool = False,
        activation: Literal["tanh", "none"] = "tanh",
    ) -> None:
        """`activation`: f; `none` as in OpenNMT-py with an MLP score."""
        super().__init__(width, memory_width, score, normaliser, None if window is None else window(width))
        self.combine = dense(memory_width + width, width, bias=bias)
        self.input_feeding, self.bounded = input_feeding, activation == "tanh"
        self.stepwise = input_feeding or self.stateful
        self.feed_width, self.output_width = width if input_feeding else 0, width

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        fixed, past = super().start(memory)
        if self.input_feeding:
            past["combined"] = memory.summary.new_zeros(memory.mask.size(0), self.output_width)
        return fixed, past

    def step_input(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> ContextOutput | None:
        if not self.input_feeding:
            return None
        return ContextOutput(state.past["context"]["combined"][:, None], {})

    def step_output(
        self, hidden: Tensor, fed: ContextOutput | None, state: State, with_attention: bool
    ) -> ContextOutput:
        read = self.read(hidden, state, with_attention)
        combined = self.combine(torch.cat((read.output, hidden), -1))  # R T D
        combined = torch.tanh(combined) if self.bounded else combined
        past = {**read.past, "combined": combined[:, -1]} if self.input_feeding else read.past
        return replace(read, output=combined, past=past)


CONTEXT_MECHANISMS: dict[str, type[ContextMechanism]] = {
    "initial": InitialContext,
    "every_step": EveryStepContext,
    "bahdanau": Bahdanau,
    "luong": Luong,
}


class RecurrentDecoder(Decoder):
    """s_t = f(y_{t-1}, s_{t-1}, the context c_t); the context mechanism: initial, every_step, bahdanau, luong"""

    constant_state = True

    def __init__(
        self,
        embedding: Embedding,
        output: Output,
        memory_width: int,
        *,
        cell: Cell = "gru",
        layers: Count = 1,
        width: Count = 256,
        context: type[ContextMechanism] = Bahdanau,
        bridge: Literal["dense", "tanh", "linear", "none", "states", "relu"] = "dense",
        residual: bool = False,
        dropout: Rate = 0.1,
    ) -> None:
        """`bridge` maps the summary of the memory to the initial state; `none`: the summary is that state. `tanh`: the
        cell state of an LSTM is bounded too. `linear`: no state is bounded. `states`: the summary holds the states of
        all layers. `relu`: a layer maps them to the initial ones."""
        super().__init__()
        self.embedding, self.output, self.dropout = embedding, output, Dropout(dropout)
        # A language model has no memory, so no context.
        self.context = context(width, memory_width) if memory_width else InitialContext(width, memory_width)
        self.rnn = RecurrentStack(
            embedding.width + self.context.feed_width, width, cell, layers, residual=residual, dropout=dropout
        )
        states = layers * width * self.rnn.tensors
        self.has_memory, self.bounded, self.linear = memory_width > 0, bridge == "tanh", bridge == "linear"
        self.rectified = bridge == "relu"
        summary_width = states if self.rectified else memory_width
        self.bridge = dense(summary_width, states) if memory_width and bridge not in ("none", "states") else None
        if self.has_memory and bridge == "none" and memory_width != states:
            raise InputError(
                f"without a bridge a summary of width {memory_width} cannot be an initial state of width {states}",
                remedy="choose bridge: dense; or one layer of rnn or gru, as wide as the encoder",
            )
        output_width = self.context.output_width
        self.readout = nn.Identity() if output_width == width else nn.Sequential(dense(output_width, width), nn.Tanh())

    @property
    def attention_shape(self) -> tuple[int, int]:
        return (1, 1) if self.context.has_attention else (0, 0)

    def start(self, memory: Memory) -> State:
        fixed, past = self.context.start(memory)
        return State(fixed, {"cells": self._initial_cells(memory), "context": past})

    def _initial_cells(self, memory: Memory) -> tuple[LayerState, ...]:
        if not self.has_memory:
            return self.rnn.zeros(memory.mask.size(0), self.embedding.weight)
        states = memory.summary if self.bridge is None else self.bridge(memory.summary)
        states = torch.relu(states) if self.rectified else states
        states = states.unflatten(-1, (len(self.rnn.layers), self.rnn.tensors, -1))  # B L 1 W; LSTM: B L 2 W
        if self.bridge is None or self.linear or self.rectified:
            return tuple(layer.unbind(1) for layer in states.unbind(1))
        # The hidden state of every cell is in (-1, 1); the cell state of an LSTM is unbounded.
        states = torch.tanh(states) if self.bounded else states
        return tuple(
            (layer[:, 0] if self.bounded else torch.tanh(layer[:, 0]), *layer[:, 1:].unbind(1))
            for layer in states.unbind(1)
        )

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        values = self.dropout(self.embedding(tokens))  # R T D
        if self.context.stepwise:
            outputs = []
            stepper = StepwiseRecurrence(self.rnn, values) if StepwiseRecurrence.applies(self.rnn, values) else None
            for step in range(tokens.size(1)):
                now = slice(step, step + 1)
                run = partial(self._run, values[:, now], None) if stepper is None else partial(stepper, step)
                output, new = self._with_context(1, run, state, with_attention)
                state = new if mask is None else _where(mask[:, now], new, state)
                outputs.append(output)
        else:
            run = partial(self._run, values, mask)
            output, state = self._with_context(values.size(1), run, state, with_attention)
            outputs = [output]
        hidden = self.dropout(self.readout(_concatenate([one.output for one in outputs])))  # R T D
        return Step(self.output(hidden), state, _attention(outputs) if with_attention else None, hidden)

    def _run(self, values: Tensor, mask: Tensor | None, fed: Tensor | None, cells: Cells) -> tuple[Tensor, Cells]:
        result: tuple[Tensor, Cells] = self.rnn(values if fed is None else torch.cat((values, fed), -1), cells, mask)
        return result

    def _with_context(self, steps: int, run: Run, state: State, with_attention: bool) -> tuple[ContextOutput, State]:
        """The output of the context mechanism after these steps of the recurrent network, and the next state."""
        cells: Cells = state.past["cells"]
        fed = self.context.step_input(cells[-1][0], state, steps, with_attention)
        hidden, cells = run(None if fed is None else fed.output, cells)
        output = self.context.step_output(hidden, fed, state, with_attention)
        return output, replace(state, past={"cells": cells, "context": output.past})


def _attention(outputs: list[ContextOutput]) -> Attention:
    """The attention weights of the steps, in one layer and one head: R 1 1 T S."""
    weights = [output.weights for output in outputs if output.weights is not None]
    entropy = [output.entropy for output in outputs if output.entropy is not None]
    return Attention(
        cross=_concatenate(weights)[:, None, None] if weights else None,
        entropy=_concatenate(entropy)[:, None, None] if entropy else None,
    )


def _concatenate(steps: list[Tensor]) -> Tensor:
    return steps[0] if len(steps) == 1 else torch.cat(steps, 1)


def _where(mask: Tensor, new: State, old: State) -> State:
    """The new state in rows whose token is not padding, the old state elsewhere."""

    def choose(one: Tree, other: Tree) -> Tree:
        if isinstance(one, dict):
            return {name: choose(one[name], other[name]) for name in one}
        if isinstance(one, tuple):
            return tuple(choose(a, b) for a, b in zip(one, other, strict=True))
        return torch.where(mask.view(-1, *[1] * (one.dim() - 1)), one, other)

    return replace(new, past=choose(new.past, old.past))
