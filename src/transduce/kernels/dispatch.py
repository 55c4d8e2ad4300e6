"""A layer, or the values it reads, in; what must be known before a faster way is taken out: hooks, precision, cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

_launching = threading.local()


@contextmanager
def free_launches() -> Iterator[None]:
    """What is launched inside is recorded, to be replayed without us: only there do kernels of our own pay.

    From Python each costs more than one of torch's, and passes of a small model wait for launches as it is: base in
    batches of 32,768 tokens made 1.84 million tokens a second recorded, and 0.41 million with the same kernels launched
    one by one.
    """
    _launching.free = True
    try:
        yield
    finally:
        _launching.free = False


@cache
def compiles() -> bool:
    """Whether kernels for a GPU can be made: some builds of torch come without their compiler."""
    return find_spec("triton") is not None


def own_kernels(values: Tensor) -> bool:
    """Whether our own kernels are to be taken for what is made of these: in a recorded pass on a GPU, in training."""
    if torch.compiler.is_compiling():  # torch joins kernels by itself there; asked first, as it cannot read the rest
        return False
    return bool(values.is_cuda and torch.is_grad_enabled() and getattr(_launching, "free", False) and compiles())


def attached(layer: nn.Module) -> bool:
    """Whether more happens when it is called than its own sums: adapters hang on such hooks."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def narrow_kind(values: Tensor) -> torch.dtype:
    """The precision that matrices which read these are multiplied in."""
    device = values.device.type
    lower = values.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if lower else values.dtype


def narrowed(values: Tensor) -> Tensor:
    """In the precision that matrices are multiplied in: what several of them read is turned once, not once in each."""
    return values.to(narrow_kind(values))
