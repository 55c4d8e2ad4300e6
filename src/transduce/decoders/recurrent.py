"""Recurrent decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from transduce.contracts import ContextMechanism, ContextOutput, Count, Decoder, Rate
from transduce.decoders.context import Bahdanau, InitialContext
from transduce.errors import InputError
from transduce.flow import Attention, Memory, State, Step, Tree
from transduce.layers.embedding import Embedding, Output
from transduce.layers.feed_forward import Dropout, dense
from transduce.layers.recurrent import Cell, LayerState, RecurrentStack, StepwiseRecurrence

Cells = tuple[LayerState, ...]
Run = Callable[
    [Tensor | None, Cells], tuple[Tensor, Cells]
]  # additional input (R T F) and the state -> hidden states (R T W) and the next state


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
