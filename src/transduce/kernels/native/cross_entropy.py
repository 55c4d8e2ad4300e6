"""Bindings of the C kernels for cross-entropy (cross_entropy.h)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def cross_entropy_forward(
    kernels: ctypes.CDLL, logits: Tensor, labels: Tensor, lse: Tensor, nll: Tensor, uniform: Tensor
) -> None:
    """Writes log sum exp of each row of logits (M V), the loss of its label (M), and the mean loss over the
    vocabulary; 0 for padding."""
    pointers = (one.data_ptr() for one in (labels, lse, nll, uniform))
    shape = (*logits.shape, logits.stride(0))
    bf16 = logits.dtype == torch.bfloat16
    kernels.transduce_cross_entropy_forward(logits.data_ptr(), bf16, *shape, *pointers, torch.get_num_threads())


def cross_entropy_backward(
    kernels: ctypes.CDLL, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, smoothing: float, result: Tensor
) -> None:
    """Writes the gradient of the smoothed loss, times `grad` (1), into `result` (M V)."""
    pointers = (one.data_ptr() for one in (labels, lse, grad))
    given = (logits.data_ptr(), logits.dtype == torch.bfloat16, *logits.shape, logits.stride(0), *pointers, smoothing)
    kernels.transduce_cross_entropy_backward(*given, result.data_ptr(), torch.get_num_threads())
