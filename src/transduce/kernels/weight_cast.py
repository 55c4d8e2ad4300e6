"""Linear layers in; their weights in the precision that matrices are multiplied in, made together, for one pass.

One by one they are more than a hundred small copies in a pass; and those that are one product must be joined, which
here they are by lying one below the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from transduce.kernels.dispatch import narrow_kind, own_kernels

ALIGNED = 8  # numbers, 16 bytes: where the matrix unit begins to read

_made = threading.local()


@contextmanager
def made_together(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Inside, `narrow` finds the weights of these layers ready, in a recorded pass on a GPU."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    weights += [layer.bias for layer in layers if layer.bias is not None]
    weights = list(dict.fromkeys(weights))  # a tied one once
    kind = narrow_kind(weights[0]) if weights else None
    if not weights or kind == weights[0].dtype or not own_kernels(weights[0]):
        yield
        return
    begins = [0, *accumulate(-(-weight.numel() // ALIGNED) * ALIGNED for weight in weights)]
    room = torch.empty(begins[-1], dtype=kind, device=weights[0].device)
    parts = [room[begin : begin + one.numel()].view(one.shape) for begin, one in zip(begins, weights, strict=False)]
    with torch.no_grad():
        torch._foreach_copy_(parts, weights)
    _made.weights = dict(zip(weights, parts, strict=True))
    try:
        yield
    finally:
        del _made.weights


@torch.no_grad()
def narrow(weights: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    """Matrices or biases one below the other, in this precision."""
    ready = getattr(_made, "weights", {})
    found = [ready[weight] for weight in weights if weight in ready]
    if len(found) == len(weights) and found[0].dtype == kind and _stacked(found):
        size = sum(map(len, found))
        return found[0].as_strided((size, *found[0].shape[1:]), found[0].stride())
    return torch.cat(list(weights)).to(kind) if len(weights) > 1 else weights[0].to(kind)


def _stacked(parts: Sequence[Tensor]) -> bool:
    """Whether one begins where the other ends."""
    return all(b.storage_offset() - a.storage_offset() == a.numel() for a, b in pairwise(parts))
