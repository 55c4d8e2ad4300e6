"""Low-precision copies of the weights of linear layers, made once for a training pass.

Under autocast every matrix is cast by a kernel of its own, more than a hundred small ones a pass, and the matrices of
joint projections are concatenated. Cast together into one buffer, matrices that are multiplied together are adjacent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, matmul_dtype

ALIGNMENT = 8  # numbers, 16 bytes: tensor cores read from multiples of it


@contextmanager
def cast_weights(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Inside, `weight_cast` finds the weights of these layers ready, in a captured training pass on a GPU."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    weights += [layer.bias for layer in layers if layer.bias is not None]
    weights = list(dict.fromkeys(weights))  # tied weights once
    dtype = matmul_dtype(weights[0]) if weights else None
    if not weights or dtype == weights[0].dtype or not dispatch.fused_training(weights[0]):
        yield
        return
    offsets = [0, *accumulate(-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in weights)]
    buffer = torch.empty(offsets[-1], dtype=dtype, device=weights[0].device)
    copies = [buffer[start : start + one.numel()].view(one.shape) for start, one in zip(offsets, weights, strict=False)]
    with torch.no_grad():
        torch._foreach_copy_(copies, weights)
    with dispatch.training_pass(cast_weights=dict(zip(weights, copies, strict=True))):
        yield


def weight_cast_reference(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(weights)).to(dtype) if len(weights) > 1 else weights[0].to(dtype)


def _is_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    ready = dispatch.current_pass().cast_weights
    copies = [ready[weight] for weight in weights if weight in ready]
    return len(copies) == len(weights) and copies[0].dtype == dtype and _adjacent(copies)


def _from_buffer(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    ready = dispatch.current_pass().cast_weights
    first = ready[weights[0]]
    return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())


def _adjacent(copies: Sequence[Tensor]) -> bool:
    return all(b.storage_offset() - a.storage_offset() == a.numel() for a, b in pairwise(copies))


WEIGHT_CAST = Operation("weight_cast", weight_cast_reference, (Backend("shared_buffer", _is_cast, _from_buffer),))


@torch.no_grad()
def weight_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices or biases, concatenated along the outputs, in this precision."""
    result: Tensor = WEIGHT_CAST(weights, dtype)
    return result
