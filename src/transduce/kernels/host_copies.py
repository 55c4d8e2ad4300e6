"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors on the host. A device makes them after the work that it has now, before what it gets later."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        given = list(values)
        self._copies = [one.to("cpu", non_blocking=True, copy=True) for one in given]  # into pinned memory
        self._event = torch.cuda.Event() if any(one.is_cuda for one in given) else None
        if self._event is not None:
            self._event.record()

    @property
    def complete(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[Tensor]:
        """The copies, as soon as they are complete."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copies


def pins_copies(device: torch.device) -> bool:
    """Whether copies from the host to this device are made from page-locked memory, so that the host does not wait."""
    return device.type == "cuda"
