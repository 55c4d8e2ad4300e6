"""Dropout, alone and added to a residual.

On a CPU torch draws a random number for each element, which took 4 to 6 % of a training step of a Transformer. The
kernels derive the mask of a tensor from one seed, which torch's generator draws: the mask follows from the state of the
generator as usual, and the backward pass computes it again instead of storing it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, native_kernels
from transduce.kernels.linear import plain
from transduce.kernels.native.training import dropout as native_dropout

MAX_NATIVE = 2**32  # elements: the hash of the C kernel has 32 bits
MAX_TRITON = 2**31  # elements: offsets have 32 bits
BLOCK = 1024  # elements of one Triton program


class _NativeDropout(torch.autograd.Function):
    """residual + dropout(x), or dropout(x) alone"""

    @staticmethod
    def forward(ctx: Any, residual: Tensor | None, x: Tensor, rate: float) -> Tensor:
        kernels = native_kernels(x)
        assert kernels is not None
        seed = torch.empty(1, dtype=torch.long).random_()  # passed by address: Python never reads it
        result = torch.empty_like(x, dtype=x.dtype if residual is None else residual.dtype)
        native_dropout(kernels, residual, x, seed, rate, result)
        ctx.save_for_backward(seed)
        ctx.rate, ctx.dtype, ctx.alone = rate, x.dtype, residual is None
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        grad = grads[0].contiguous()
        kernels = native_kernels(grad)
        assert kernels is not None
        x_grad = torch.empty_like(grad, dtype=ctx.dtype)
        native_dropout(kernels, None, grad, ctx.saved_tensors[0], ctx.rate, x_grad)
        return None if ctx.alone else grad, x_grad, None


class _TritonDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, rate: float) -> Tensor:
        from transduce.kernels.triton.add_norm import dropout_add_forward

        seed, threshold, scale = dropout_seed(residual, rate)
        result = torch.empty_like(residual)
        dropout_add_forward[(_programs(residual),)](
            residual, x, seed, result, residual.numel(), threshold, scale, rate > 0, block=BLOCK
        )
        ctx.save_for_backward(seed)
        ctx.rate, ctx.dtype = rate, x.dtype
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from transduce.kernels.triton.add_norm import dropout_backward

        grad = grads[0].contiguous()
        if not ctx.rate:
            return grad, grad.to(ctx.dtype), None
        threshold, scale = dropout_scale(ctx.rate)
        x_grad = torch.empty_like(grad, dtype=ctx.dtype)
        seed = ctx.saved_tensors[0]
        dropout_backward[(_programs(grad),)](grad, seed, x_grad, grad.numel(), threshold, scale, block=BLOCK)
        return grad, x_grad, None


def dropout_reference(x: Tensor, rate: float) -> Tensor:
    return F.dropout(x, rate)


def dropout_add_reference(residual: Tensor, x: Tensor, rate: float) -> Tensor:
    return residual + (F.dropout(x, rate) if rate else x)


def _accepts_native(x: Tensor, rate: float) -> bool:
    return 0 < rate < 1 and x.is_contiguous() and 0 < x.numel() < MAX_NATIVE and native_kernels(x) is not None


def _accepts_native_add(residual: Tensor, x: Tensor, rate: float) -> bool:
    if not rate:
        return False
    alike = residual.shape == x.shape and residual.dtype == torch.float32 and residual.is_contiguous()
    return alike and _accepts_native(x, rate)


def _accepts_triton_add(residual: Tensor, x: Tensor, rate: float) -> bool:
    return dispatch.fused_training(residual) and fits_triton(residual, x)


def fits_triton(residual: Tensor, x: Tensor | None) -> bool:
    """Whether the kernels can read a residual and what is added to it."""
    alike = x is None or (x.shape == residual.shape and x.is_contiguous())
    return alike and residual.is_contiguous() and 0 < residual.numel() < MAX_TRITON


def _native(x: Tensor, rate: float) -> Tensor:
    result: Tensor = _NativeDropout.apply(None, x, rate)
    return result


def _native_add(residual: Tensor, x: Tensor, rate: float) -> Tensor:
    result: Tensor = _NativeDropout.apply(residual, x, rate)
    return result


def triton_dropout_add(residual: Tensor, x: Tensor, rate: float) -> Tensor:
    result: Tensor = _TritonDropoutAdd.apply(plain(residual), plain(x), rate)
    return result


DROPOUT = Operation("dropout", dropout_reference, (Backend("native", _accepts_native, _native),))
DROPOUT_ADD = Operation(
    "dropout_add",
    dropout_add_reference,
    (
        Backend("native", _accepts_native_add, _native_add),
        Backend("triton", _accepts_triton_add, triton_dropout_add),
    ),
)


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Each number is 0 with probability `rate`, else divided by 1 - rate (Srivastava 2014)."""
    if not training:
        return x
    result: Tensor = DROPOUT(x, rate)
    return result


def dropout_add(residual: Tensor, x: Tensor, rate: float) -> Tensor:
    """residual + dropout(x)"""
    result: Tensor = DROPOUT_ADD(residual, x, rate)
    return result


def dropout_scale(rate: float) -> tuple[int, float]:
    """The threshold, out of 2 ** 32, below which a hash drops a number, and the factor of the others."""
    return min(int(rate * 2**32), 2**32 - 1), 1 / (1 - rate) if rate < 1 else 0.0


def dropout_seed(x: Tensor, rate: float) -> tuple[Tensor, int, float]:
    seed = torch.empty(1, dtype=torch.long, device=x.device)
    return (seed.random_() if rate else seed), *dropout_scale(rate)


def _programs(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)
