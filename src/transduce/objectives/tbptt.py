"""Truncated backpropagation through time."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from transduce.contracts import Count, Forward, Loss, Objective, Rate
from transduce.flow import Batch, Padded, State, map_tensors
from transduce.model import Transducer
from transduce.objectives.likelihood import cross_entropy


class TruncatedBPTT(Objective):
    """cross-entropy over windows; the state is passed on, the gradient is cut (Williams & Peng 1990)

    The value is that of the plain cross-entropy, whatever the window. Each window is reached by the gradient of its own
    tokens alone: truncated back-propagation through time, with the state carried over (Mikolov 2010). What a decoder
    keeps in `fixed` (its memory of a source) is read by every window, and its gradient is not cut.
    """

    capturable = True

    def __init__(self, *, window: Count = 64, label_smoothing: Rate = 0.0) -> None:
        self.window, self.label_smoothing = window, label_smoothing

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        network = cast(Transducer, model)
        inputs, gold = batch.decoder_inputs, batch.labels
        state = network.start(batch)
        total = nll = torch.zeros((), device=batch.device)
        for begin in range(0, inputs.values.size(1), self.window):
            now = slice(begin, begin + self.window)
            step = network.advance(inputs.values[:, now], state)
            labels = Padded(gold.values[:, now], gold.mask[:, now])
            found = cross_entropy(step.logits, labels, self.label_smoothing)
            total, nll = total + found.smoothed, nll + found.nll
            state = cut(step.state)
        return Loss(total, {"nll": nll})


def cut(state: State) -> State:
    """The same state, detached."""
    return replace(state, past={name: map_tensors(lambda x: x.detach(), tree) for name, tree in state.past.items()})
