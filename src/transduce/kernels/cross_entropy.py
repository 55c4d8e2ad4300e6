"""Label-smoothed cross-entropy of logits.

    loss = (1 - eps) (lse - x_label) + eps (lse - mean x),   d loss / d x_j = p_j - (1 - eps) [j = label] - eps / V

A plain computation stores three copies of the logits in fp32, for a large vocabulary the largest tensors of a training
step. Here they are read in their own precision, a few rows at a time, and only lse = log sum exp x is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, native_kernels
from transduce.kernels.linear import LinearOutput, column_sums, plain
from transduce.kernels.native import training as native

IGNORED = -100  # the label of padding
# A tile of the kernel that sums columns. 16,384 rows of 32,000 logits took 0.53 ms, as long as row by row without
# sums; with tiles of 64 rows and 64 columns 0.99.
TILE_ROWS, TILE_COLUMNS, PROGRAMS = 2, 2048, 2048
CHUNK = 2**18  # logits that torch's operations work on at a time: what fits into the cache of a processor


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, label_smoothing: float, reuse_logits: bool = False
) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the plain one, sums over the labels that are not IGNORED; logits (M V), labels (M)."""
    log_probs = _wide(logits).log_softmax(-1)
    real = labels != IGNORED
    nll = -log_probs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1).where(real, 0.0).sum()
    uniform = -log_probs.mean(-1).where(real, 0.0).sum()
    return torch.lerp(nll, uniform, label_smoothing), nll.detach()


class _CrossEntropy(torch.autograd.Function):
    """The common part of the backends, which are its subclasses."""

    @staticmethod
    def totals(ctx: Any, labels: Tensor, nll: Tensor, uniform: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Sums over the real rows of the negative log-likelihood of the label, and of its mean over the vocabulary."""
        real = labels != IGNORED
        total_nll = nll.where(real, 0.0).sum()
        total = torch.lerp(total_nll, uniform.where(real, 0.0).sum(), smoothing) if smoothing else total_nll.clone()
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(total_nll)
        return total, total_nll


class _Chunked(_CrossEntropy):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        lse, nll, uniform = (_wide(logits.new_empty(len(labels))) for _ in range(3))
        for rows in _chunks(logits):
            part, right = _wide(logits[rows]), labels[rows].clamp(min=0)
            lse[rows] = part.logsumexp(1)
            nll[rows] = lse[rows] - part.gather(1, right[:, None]).squeeze(1)
            if smoothing:
                uniform[rows] = lse[rows] - part.mean(1)
        ctx.save_for_backward(logits, labels, lse)
        return _CrossEntropy.totals(ctx, labels, nll, uniform, smoothing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, lse = ctx.saved_tensors
        size, eps = logits.size(1), ctx.smoothing
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        padding, right = labels == IGNORED, torch.full_like(lse[:, None], eps - 1)
        for rows in _chunks(logits):
            # In place, in the result itself where it has the precision of the sums.
            part = result[rows] if result.dtype == lse.dtype else torch.empty_like(logits[rows], dtype=lse.dtype)
            torch.sub(logits[rows], lse[rows, None], out=part).exp_()
            if eps:
                part.sub_(eps / size)
            part.scatter_add_(1, labels[rows].clamp(min=0)[:, None], right[rows]).mul_(grads[0])
            part.masked_fill_(padding[rows, None], 0.0)
            if part.dtype != result.dtype:
                result[rows] = part
        return result, None, None


class _Native(_CrossEntropy):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, in_place: bool) -> tuple[Tensor, Tensor]:
        kernels = native_kernels(logits)
        assert kernels is not None
        lse, nll, uniform = (torch.empty(len(labels)) for _ in range(3))
        native.cross_entropy_forward(kernels, logits, labels, lse, nll, uniform)
        ctx.save_for_backward(logits, labels, lse)
        ctx.in_place = in_place
        return _CrossEntropy.totals(ctx, labels, nll, uniform, smoothing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        kernels = native_kernels(logits)
        assert kernels is not None
        result = logits.detach() if ctx.in_place else torch.empty(logits.shape, dtype=logits.dtype)
        native.cross_entropy_backward(kernels, logits, labels, lse, grads[0].float(), ctx.smoothing, result)
        if ctx.in_place:
            torch.autograd.graph.increment_version(logits)  # a second backward pass is refused
        return result, None, None, None


class _Triton(_CrossEntropy):
    """logits: M V, or M P with P - V padding columns. `bias`: of the output layer; only its gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, labels: Tensor, size: int, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        from transduce.kernels.triton.training import cross_entropy_forward

        lse, nll, uniform = (_wide(logits.new_empty(len(labels))) for _ in range(3))
        given = (logits, labels, lse, nll, uniform, logits.stride(0), size)
        cross_entropy_forward[(len(labels),)](*given, tile_rows=4, tile_columns=512, num_warps=2)
        ctx.save_for_backward(logits, labels, lse)
        ctx.size, ctx.bias_dtype = size, None if bias is None else bias.dtype
        return _CrossEntropy.totals(ctx, labels, nll, uniform, smoothing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        if ctx.bias_dtype is None:
            return logits_grad(logits, labels, lse, grads[0], ctx.smoothing, ctx.size), None, None, None, None
        result, sums = logits_grad_with_sums(logits, labels, lse, grads[0], ctx.smoothing)
        return result, sums.to(ctx.bias_dtype), None, None, None


def logits_grad(logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, smoothing: float, size: int) -> Tensor:
    """The gradient of the loss, times a factor: M V, or M P where the logits have padding columns (P > V)"""
    from transduce.kernels.triton.training import cross_entropy_backward

    result = torch.empty_like(logits)
    strides = logits.stride(0), result.stride(0)
    cross_entropy_backward[(len(labels),)](logits, labels, lse, factor, result, *strides, size, smoothing, block=4096)
    if logits.size(1) > size:
        result[:, size:].zero_()
    return result


def logits_grad_with_sums(
    logits: Tensor, labels: Tensor, lse: Tensor, factor: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The gradient (M V), and the sums of its columns (V, fp32): the gradient of the bias of the output layer"""
    from transduce.kernels.triton.training import cross_entropy_backward_sums

    count, size = logits.shape
    across = -(-size // TILE_COLUMNS)
    down = min(-(-count // TILE_ROWS), max(1, PROGRAMS // across))
    result, sums = torch.empty_like(logits), lse.new_empty(down, size)
    cross_entropy_backward_sums[(across, down)](
        logits, labels, lse, factor, result, sums, count, size, smoothing,
        tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS, num_warps=8,
    )  # fmt: skip
    return result, column_sums(sums)[1]


def _accepts_triton(logits: Tensor, labels: Tensor, label_smoothing: float, reuse_logits: bool = False) -> bool:
    return dispatch.runs_triton(logits)


def triton_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float, reuse_logits: bool = False
) -> tuple[Tensor, Tensor]:
    size, bias, read = logits.size(1), None, plain(logits)
    if isinstance(logits, LinearOutput):
        if logits.padding:
            read = logits.raw
        elif len(logits.biases) == 1 and logits.is_contiguous() and size % 16 == 0:  # else tiles are not aligned
            read, bias = logits.raw, logits.biases[0]
    total, nll = _Triton.apply(read, bias, labels, size, label_smoothing)
    return total, nll


def _accepts_native(logits: Tensor, labels: Tensor, label_smoothing: float, reuse_logits: bool = False) -> bool:
    return native_kernels(plain(logits)) is not None and logits.stride(1) == 1


def native_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float, reuse_logits: bool = False
) -> tuple[Tensor, Tensor]:
    in_place = reuse_logits and isinstance(logits, LinearOutput) and logits.is_contiguous()
    total, nll = _Native.apply(plain(logits), labels, label_smoothing, in_place)
    return total, nll


def chunked_cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float, reuse_logits: bool = False
) -> tuple[Tensor, Tensor]:
    total, nll = _Chunked.apply(plain(logits), labels, label_smoothing)
    return total, nll


CROSS_ENTROPY = Operation(
    "cross_entropy",
    cross_entropy_reference,
    (
        Backend("triton", _accepts_triton, triton_cross_entropy),
        Backend("native", _accepts_native, native_cross_entropy),
        Backend("chunked", lambda *_: True, chunked_cross_entropy),
    ),
)


def cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float, *, reuse_logits: bool = False
) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the plain one, sums over the labels that are not IGNORED; logits (M V), labels (M).

    `reuse_logits`: the caller needs the logits no more. On a CPU the gradient of a LinearOutput then overwrites it.
    """
    total, nll = CROSS_ENTROPY(logits, labels, label_smoothing, reuse_logits)
    return total, nll


def _wide(values: Tensor) -> Tensor:
    """Sums over a vocabulary lose digits in bf16."""
    return values if values.dtype == torch.double else values.float()


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, CHUNK // logits.size(1))
    return [slice(begin, begin + step) for begin in range(0, len(logits), step)]
