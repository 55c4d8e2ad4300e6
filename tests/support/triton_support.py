"""Triton in tests: its kernels run on a GPU, or in Triton's interpreter on a CPU, or are skipped with the reason.

Imported by session_fixtures.py before anything imports Triton, which reads TRITON_INTERPRET at its own import.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INSTALLED = find_spec("triton") is not None
if INSTALLED and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if INSTALLED and not INTERPRETED else "cpu"
# The interpreter has no bf16, and tensor cores no exact fp32.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
NOT_INSTALLED = "Triton is not installed: its kernels are tested neither on a GPU nor in its interpreter"
needs_triton = pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)


def allow_any_device(patch: pytest.MonkeyPatch) -> None:
    """Operations take their GPU backends wherever the kernels can run here, Triton's in its interpreter in fp32 too."""
    from transduce.kernels import dispatch

    patch.setattr(dispatch, "runs_triton", lambda x: True)
    patch.setattr(dispatch, "runs_asynchronously", lambda x: True)
    if INTERPRETED:
        patch.setattr(dispatch, "TENSOR_CORE_DTYPES", DTYPES)


def _convert_scalars() -> None:
    """The interpreter before Triton 3.7 converts arrays of one number to int, which NumPy 2.4 refuses (triton#9171)."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if INTERPRETED:
    _convert_scalars()
