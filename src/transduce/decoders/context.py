"""Context mechanisms of recurrent decoders: initial state, context at every step, Bahdanau and Luong attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from transduce.attention.attend import Attend
from transduce.attention.normalisers import Softmax
from transduce.attention.scores import MLP, Bilinear
from transduce.contracts import (
    AttentionPart,
    AttentionScore,
    ContextMechanism,
    ContextOutput,
    Normaliser,
    Window,
    WindowMask,
)
from transduce.flow import Memory, State, Tree, map_tensors
from transduce.layers.feed_forward import dense


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
