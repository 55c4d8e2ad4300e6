"""Hidden states and a memory in, what a recurrent decoder feeds and outputs out: from one vector to attention."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.attention.attend import Attend
from transduce.attention.normalisers import Softmax
from transduce.attention.scores import MLP, Bilinear
from transduce.contracts import Normaliser, Read, Reader, Score
from transduce.flow import Memory, State, Tree
from transduce.layers.dense import dense


class Start(Reader):
    """the memory is seen once, as the first state: s_0 = dense(h_T) (Sutskever 2014)"""

    def __init__(self, width: int, memory_width: int) -> None:
        super().__init__()
        self.output_width = width

    def after(self, hidden: Tensor, fed: Read | None, state: State, with_attention: bool) -> Read:
        return Read(hidden, {})


class Every(Reader):
    """the one vector again at every step: s_t = f(y_{t-1}, s_{t-1}, c) (Cho 2014)"""

    def __init__(self, width: int, memory_width: int) -> None:
        super().__init__()
        self.feed_width, self.output_width = memory_width, width + memory_width

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        return {"summary": memory.summary}, {}

    def before(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> Read:
        summary = state.fixed["summary"]
        every_row = summary.repeat_interleave(state.beams, 0)[:, None].expand(-1, steps, -1)  # R T D
        return Read(every_row, {})

    def after(self, hidden: Tensor, fed: Read | None, state: State, with_attention: bool) -> Read:
        assert fed is not None
        return Read(torch.cat((hidden, fed.output), -1), {})


class AttentionReader(Reader):
    """What the two attention readers share: keys computed once a source, beams as further query rows."""

    def __init__(self, width: int, memory_width: int, score: type[Score], normaliser: type[Normaliser]) -> None:
        super().__init__()
        self.attend = Attend(score(width, memory_width), normaliser())

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        return {"keys": self.attend.keys(memory.values), "values": memory.values, "mask": memory.mask}, {}

    def read(self, query: Tensor, state: State, with_attention: bool) -> tuple[Tensor, Tensor | None]:
        """query (R T D) -> context (R T D), weights (R T S)"""
        keys, values, mask = state.fixed["keys"], state.fixed["values"], state.fixed["mask"]
        rows, steps, width = query.shape
        context, weights = self.attend(
            query.reshape(keys.size(0), -1, width), keys, values, mask[:, None], with_attention=with_attention
        )
        if weights is not None:
            weights = weights.reshape(rows, steps, -1)
        return context.reshape(rows, steps, -1), weights


class Bahdanau(AttentionReader):
    """attend with the state before, feed the context in: s_t = f(y_{t-1}, s_{t-1}, c_t) (Bahdanau 2015)"""

    stepwise = True

    def __init__(
        self,
        width: int,
        memory_width: int,
        *,
        score: type[Score] = MLP,
        normaliser: type[Normaliser] = Softmax,
    ) -> None:
        super().__init__(width, memory_width, score, normaliser)
        self.feed_width, self.output_width = memory_width, width + memory_width

    def before(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> Read:
        context, weights = self.read(hidden[:, None], state, with_attention)
        return Read(context, {}, weights)

    def after(self, hidden: Tensor, fed: Read | None, state: State, with_attention: bool) -> Read:
        assert fed is not None
        return Read(torch.cat((hidden, fed.output), -1), {}, fed.weights)


class Luong(AttentionReader):
    """attend with the state after: tanh(W [c_t; s_t]), fed into the next step or not (Luong 2015)"""

    def __init__(
        self,
        width: int,
        memory_width: int,
        *,
        score: type[Score] = Bilinear,
        normaliser: type[Normaliser] = Softmax,
        input_feeding: bool = True,
    ) -> None:
        super().__init__(width, memory_width, score, normaliser)
        self.combine = dense(memory_width + width, width, bias=False)
        self.stepwise = input_feeding
        self.feed_width, self.output_width = width if input_feeding else 0, width

    def start(self, memory: Memory) -> tuple[dict[str, Tree], dict[str, Tree]]:
        fixed, past = super().start(memory)
        if self.stepwise:
            past = {"combined": memory.summary.new_zeros(memory.mask.size(0), self.output_width)}
        return fixed, past

    def before(self, hidden: Tensor, state: State, steps: int, with_attention: bool) -> Read | None:
        if not self.stepwise:
            return None
        return Read(state.past["reader"]["combined"][:, None], {})

    def after(self, hidden: Tensor, fed: Read | None, state: State, with_attention: bool) -> Read:
        context, weights = self.read(hidden, state, with_attention)
        combined = torch.tanh(self.combine(torch.cat((context, hidden), -1)))  # R T D
        return Read(combined, {"combined": combined[:, -1]} if self.stepwise else {}, weights)


READERS: dict[str, type[Reader]] = {"start": Start, "every": Every, "bahdanau": Bahdanau, "luong": Luong}
