"""Language-model objectives: truncated backpropagation through time, source and target as one sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from transduce.contracts import Count, Forward, Loss, Objective, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Padded, State, map_tensors
from transduce.model import DecoderOnly, Transducer
from transduce.objectives.cross_entropy import cross_entropy, likelihood, log_probabilities


class TruncatedBPTT(Objective):
    """cross-entropy over windows; the state is carried over, the gradient is truncated (Williams & Peng 1990)

    The loss is that of plain cross-entropy for any window. The gradient of a token does not pass beyond its window:
    truncated backpropagation through time, with the state carried over (Mikolov 2010). `State.fixed`, the memory of a
    source, is read by every window, and its gradient is not truncated.
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


class PrefixLM(Objective):
    """cross-entropy of source and target as one sequence, for decoder-only models

    The stream is x </s> <s> y </s>. Cross-entropy, the default, predicts y </s> only; this objective predicts every
    token after the first, so it learns p(x) too, as in Dai & Le 2015. Inputs and outputs stay the same.
    """

    def __init__(self, *, label_smoothing: Rate = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if not isinstance(model, DecoderOnly):
            raise InputError(
                "only a decoder-only model has source and target in one sequence",
                remedy="leave model.encoder out, or set training.objective: {kind: cross_entropy}",
            )

    def __call__(self, model: Forward, batch: Batch) -> Loss:
        whole = joined(batch)
        found = likelihood(log_probabilities(model(whole).logits), whole.labels, self.label_smoothing)
        return Loss(found.smoothed, {"nll": found.nll.detach()})

    def count(self, batch: Batch) -> int:
        return int(joined(batch).labels.mask.sum())


def joined(batch: Batch) -> Batch:
    """The pairs as single sequences x </s> <s> y </s>, right-padded."""
    if batch.source is None:
        return batch
    assert batch.target is not None
    values = torch.cat((batch.source.values, batch.target.values), 1)
    mask = torch.cat((batch.source.mask, batch.target.mask), 1)
    real = mask.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    longest = int(mask.sum(1).max())
    values, mask = values.gather(1, real.indices)[:, :longest], real.values.bool()[:, :longest]
    return Batch(target=Padded(values, mask), rows=batch.rows)
