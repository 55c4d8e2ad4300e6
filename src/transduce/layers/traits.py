"""A layer, or the values it reads, in; what must be known before a faster way is taken out: hooks, and precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
