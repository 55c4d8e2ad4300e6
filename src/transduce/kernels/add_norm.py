"""Residual addition, dropout and normalisation, alone and as one operation.

With torch's own kernels residual + dropout(x) and its norm are four passes over fp32 numbers, and the gradient six. The
Triton kernels read every number once, sum in fp32, and write what a matrix reads next in the precision of matrix
products. The dropout mask follows from a seed and is computed again in the backward pass.

On a CPU torch draws a random number for each element, which took 4 to 6 % of a training step of a Transformer. The
kernels derive the mask of a tensor from one seed, which torch's generator draws: the mask follows from the state of the
generator as usual, and the backward pass computes it again instead of storing it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, has_hooks, matmul_dtype, native_kernels
from transduce.kernels.linear import LinearOutput, column_sums, plain
from transduce.kernels.native.training import dropout as native_dropout

MAX_NATIVE = 2**32  # elements: the hash of the C kernel has 32 bits
MAX_TRITON = 2**31  # elements: offsets have 32 bits
BLOCK = 1024  # elements of one Triton program
MAX_WIDTH = 8192  # a row is one tile


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
        from transduce.kernels.triton.training import dropout_add_forward

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
        from transduce.kernels.triton.training import dropout_backward

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


def norm_reference(norm: nn.Module, x: Tensor) -> Tensor:
    """Layer or RMS norm of each row: ... D -> ... D"""
    given: Any = norm
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, given.normalized_shape, given.weight, given.bias, given.eps)
    return F.rms_norm(x, given.normalized_shape, given.weight, given.eps)


def pre_norm_reference(norm: nn.Module, residual: Tensor, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x), and norm(s)"""
    total = residual + F.dropout(x, rate)
    return total, norm_reference(norm, total)


def post_norm_reference(norm: nn.Module, residual: Tensor, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """norm(residual + dropout(x)) twice: as the next residual, and as the input of the next layer"""
    normed = norm_reference(norm, residual + F.dropout(x, rate))
    return normed, normed


def accepts_add_norm(norm: nn.Module, residual: Tensor, x: Tensor, rate: float) -> bool:
    return is_row_norm(norm) and fits(residual, x)


def is_row_norm(norm: nn.Module) -> bool:
    """Whether it is a layer or RMS norm with weights, and nothing is attached to it."""
    return isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.elementwise_affine and not has_hooks(norm)


def fits(residual: Tensor, x: Tensor | None = None) -> bool:
    """Whether the Triton kernels apply to tensors of these shapes."""
    return dispatch.fused_training(residual) and residual.size(-1) <= MAX_WIDTH and fits_triton(residual, x)


def fused_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return _fused(norm, x, None, 0.0, False)[1]


def fused_pre_norm(norm: nn.Module, residual: Tensor, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    return _fused(norm, residual, x, rate, True)


def fused_post_norm(norm: nn.Module, residual: Tensor, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The gradients of both readers are added where they are used."""
    return _fused(norm, residual, x, rate, False)


def _fused(norm: nn.Module, residual: Tensor, x: Tensor | None, rate: float, keep_sum: bool) -> tuple[Tensor, Tensor]:
    given: Any = norm
    options = rate, given.eps, isinstance(norm, nn.LayerNorm), keep_sum
    x_bias = None
    if isinstance(x, LinearOutput) and len(x.biases) == 1 and len(x.biases[0]) == residual.size(-1):
        x_bias, x = x.biases[0], x.raw
    x, parameters = None if x is None else plain(x), (given.weight, getattr(given, "bias", None))
    first, normed = _AddNorm.apply(plain(residual), x, x_bias, *parameters, *options)
    return first, normed


def _accepts_norm(norm: Any, x: Tensor) -> bool:
    return bool(norm.elementwise_affine) and fits(x)


NORM = Operation("norm", norm_reference, (Backend("triton", _accepts_norm, fused_norm),))
PRE_NORM = Operation("pre_norm", pre_norm_reference, (Backend("triton", accepts_add_norm, fused_pre_norm),))
POST_NORM = Operation("post_norm", post_norm_reference, (Backend("triton", accepts_add_norm, fused_post_norm),))


def row_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Layer or RMS norm of each row: ... D -> ... D"""
    result: Tensor = NORM(norm, x)
    return result


class PendingSum(NamedTuple):
    """residual + dropout(x), which the next norm computes in the same pass over the numbers."""

    residual: Tensor
    x: Tensor
    rate: float


class NormPair(NamedTuple):
    """The same normalised rows as the next residual and as the input of the next layer."""

    residual: Tensor
    x: Tensor


ResidualStream = Tensor | PendingSum | NormPair  # the rows between two layers


def _rate(dropout: nn.Module) -> float:
    """A network for inference has nn.Identity in the place of dropout."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def add_residual(residual: Tensor, x: Tensor, dropout: nn.Module) -> ResidualStream:
    """residual + dropout(x), in a pre-norm stack"""
    rate = _rate(dropout)
    return PendingSum(residual, x, rate) if fits(residual, x) else dropout_add(residual, x, rate)


def add_norm(norm: nn.Module, residual: Tensor, x: Tensor, dropout: nn.Module, mask: Tensor | None) -> ResidualStream:
    """norm(residual + dropout(x)), in a post-norm stack; mask: the real rows, which a batch norm needs"""
    rate = _rate(dropout)
    if accepts_add_norm(norm, residual, x, rate):
        return NormPair(*fused_post_norm(norm, residual, x, rate))
    result: Tensor = norm(dropout_add(residual, x, rate), mask)
    return result


def norm_stream(norm: nn.Module, stream: ResidualStream, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows themselves, and their norm."""
    if isinstance(stream, PendingSum):
        if is_row_norm(norm):
            return fused_pre_norm(norm, *stream)
        stream = dropout_add(stream.residual, stream.x, stream.rate)
    assert isinstance(stream, Tensor)
    return stream, norm(stream, mask)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        x: Tensor | None,
        x_bias: Tensor | None,  # of the linear layer that x is the output of; only its gradient is computed here
        weight: Tensor,
        bias: Tensor | None,
        rate: float,
        eps: float | None,
        centred: bool,
        keep_sum: bool,
    ) -> tuple[Tensor, Tensor]:
        from transduce.kernels.triton.training import add_norm_forward

        width = residual.size(-1)
        count = residual.numel() // width
        seed, threshold, scale = dropout_seed(residual, rate if x is not None else 0.0)
        drops = x is not None and rate > 0
        means, inverse_stds = residual.new_empty(2, count, dtype=torch.float32)
        result = torch.empty_like(residual, dtype=matmul_dtype(residual))
        total = torch.empty_like(residual) if keep_sum else None
        block, rows, warps = _tile(width)
        add_norm_forward[(-(-count // rows),)](
            residual, x, seed, weight, bias, total, result, means, inverse_stds, count, threshold, scale,
            torch.finfo(residual.dtype).eps if eps is None else eps,
            width=width, drops=drops, centred=centred, block=block, rows=rows, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(residual, x, weight, seed, means, inverse_stds)
        ctx.rate, ctx.drops, ctx.centred, ctx.keep_sum = rate, drops, centred, keep_sum
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_bias_dtype = x_bias.dtype if x_bias is not None and x_bias.requires_grad else None
        ctx.set_materialize_grads(False)
        return result.view_as(result) if total is None else total, result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, other_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        from transduce.kernels.triton.training import add_norm_backward

        residual, x, weight, seed, means, inverse_stds = ctx.saved_tensors
        width = residual.size(-1)
        if grad is None and not ctx.keep_sum:
            grad, other_grad = other_grad, None
        grad = torch.zeros_like(residual) if grad is None else grad.contiguous()
        other_grad = None if other_grad is None else other_grad.contiguous()
        count = residual.numel() // width
        threshold, scale = dropout_scale(ctx.rate)
        block, rows, warps = _tile(width)
        programs = min(-(-count // rows), 8 * _multiprocessors(residual.device))
        residual_grad, x_grad = torch.empty_like(residual), None if x is None else torch.empty_like(x)
        sums_x = ctx.x_bias_dtype is not None
        sums = residual.new_empty(programs, (3 if sums_x else 2) * width, dtype=torch.float32)
        add_norm_backward[(programs,)](
            grad, other_grad, residual, x, seed, weight, means, inverse_stds, residual_grad, x_grad, sums,
            count, threshold, scale,
            width=width, drops=ctx.drops, centred=ctx.centred, keep_sum=ctx.keep_sum, sums_x=sums_x,
            block=block, rows=rows, num_warps=warps,
        )  # fmt: skip
        weight_grad, bias_grad, *x_bias_grad = column_sums(sums)[1].split(width)
        return (
            residual_grad,
            x_grad,
            x_bias_grad[0].to(ctx.x_bias_dtype) if sums_x else None,
            weight_grad.to(weight.dtype),
            None if ctx.bias_dtype is None else bias_grad.to(ctx.bias_dtype),
            None, None, None, None,
        )  # fmt: skip


def _tile(width: int) -> tuple[int, int, int]:
    """The padded length of a tile's rows, their number, and the number of warps."""
    block = max(16, 1 << (width - 1).bit_length())
    if block <= 512:
        return block, 1024 // block, 2
    return block, 2 if block == 1024 else 1, 4 if block <= 2048 else 8


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
