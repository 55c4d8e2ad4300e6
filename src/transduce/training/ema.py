"""A model after each update enters; the exponential moving average of its parameters leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """average = decay * average + (1 - decay) * weights, kept in single precision whatever the weights are in."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # What is not trained is its own average.
        self.values = {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        # While few updates have been made the average would still be mostly the random beginning.
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [p.detach().float() for name, p in model.named_parameters() if name in self.values]
        torch._foreach_lerp_(list(self.values.values()), weights, 1 - decay)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(tensors[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights; after it, its own again, bit for bit."""
        own = {name: p.detach().clone() for name, p in model.named_parameters() if name in self.values}
        fill(model, self.values)
        try:
            yield
        finally:
            fill(model, own)


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Parameters by name; tied ones have one name, and what has no value stays as it is."""
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.copy_(values[name])
