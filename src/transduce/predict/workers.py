"""Batches and what is to be done with each in, the results in order out: one after the other, or several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from transduce.errors import InputError

Work = TypeVar("Work")
Done = TypeVar("Done")


def spread(do: Callable[[Work], Done], work: Sequence[Work], workers: int, device: torch.device) -> Iterator[Done]:
    """Threads, not processes: torch leaves Python to the others while it computes, and the weights lie there once.

    Each works on one core: two threads that share a small matrix wait for each other more than they compute.
    """
    if workers < 1 or (workers > 1 and device.type != "cpu"):
        raise InputError(f"{workers} workers on {device.type}", remedy="workers are for the CPU; leave them out")
    if workers == 1 or len(work) < 2:
        yield from map(do, work)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(do, work)
    finally:
        torch.set_num_threads(before)
