"""Binding of the C kernel for dropout (dropout.h)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def dropout(
    kernels: ctypes.CDLL, residual: Tensor | None, x: Tensor, seed: Tensor, rate: float, result: Tensor
) -> None:
    """Writes residual + dropout(x); all are contiguous, the residual and a sum with it in fp32."""
    bf16, bf16_result = x.dtype == torch.bfloat16, result.dtype == torch.bfloat16
    given = (None if residual is None else residual.data_ptr(), x.data_ptr(), bf16, x.numel(), seed.data_ptr(), rate)
    kernels.transduce_dropout(*given, result.data_ptr(), bf16_result, torch.get_num_threads())
