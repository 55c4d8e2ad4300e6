"""Language-model training of decoder-only models on source and target."""

from __future__ import annotations

import torch
from torch import nn

from transduce.contracts import Forward, Loss, Objective, Rate
from transduce.errors import InputError
from transduce.flow import Batch, Padded
from transduce.model import DecoderOnly
from transduce.objectives.likelihood import likelihood, log_probabilities


class PrefixLM(Objective):
    """cross-entropy of source and target as one sequence, for decoder-only models

    The stream is x </s> <s> y </s>. Cross-entropy, the default, foretells y </s> only; this one foretells every token
    after the first, so it learns p(x) too, as in Dai & Le 2015. Inputs and outputs stay the same.
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
