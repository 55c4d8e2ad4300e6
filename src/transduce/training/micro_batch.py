"""A batch in, the pieces of it that one process computes out; and what is known of an update when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.flow import Batch
from transduce.training.distributed import Processes


@dataclass(frozen=True)
class Piece:
    """Rows of a batch that are computed in one go."""

    first: int  # where they begin in the whole batch
    batch: Batch

    def halves(self) -> list[Piece]:
        """Two smaller ones; none for a single row."""
        if self.batch.size == 1:
            return []
        low, high = torch.arange(self.batch.size).tensor_split(2)
        return [
            Piece(self.first, self.batch.select(low)),
            Piece(self.first + len(low), self.batch.select(high)),
        ]


def pieces_of(batch: Batch, processes: Processes, pieces: int) -> list[Piece]:
    """This process's contiguous share of the batch, in `pieces` slices; empty ones are left out."""
    shares = torch.arange(batch.size).tensor_split(processes.size * pieces)
    own = shares[processes.rank * pieces : (processes.rank + 1) * pieces]
    return [Piece(int(rows[0]), batch.select(rows)) for rows in own if len(rows)]


@dataclass(frozen=True)
class Work:
    """What one update is made from, as one process sees it."""

    pieces: list[Piece]
    count: int  # what the loss of the whole update, over all processes, is a sum over


@dataclass(frozen=True)
class Result:
    loss: float  # sums over `count`, over all processes
    parts: dict[str, float]
    count: int
    gradient_norm: float  # before clipping
    bad: str = ""  # not finite, so the weights did not move: the first module that was bad
    splits: int = 0  # pieces halved after running out of memory
    lost: tuple[int, ...] = ()  # examples that do not fit into memory even alone


class Launched:
    """An update that was begun. Its numbers are on their way from the device; its result waits for them."""

    def __init__(
        self, numbers: Tensor, finish: Callable[[list[float]], Result], flags: tuple[bool, ...], *, waits: bool
    ) -> None:
        self.flags = flags  # raised by any process
        self.finish, self.known = finish, finish(numbers.tolist()) if waits else None
        if self.known is None:
            self.numbers = torch.empty(numbers.shape, pin_memory=numbers.is_cuda).copy_(numbers, non_blocking=True)
            self.arrived = torch.cuda.Event() if numbers.is_cuda else None
            if self.arrived is not None:
                self.arrived.record()

    def result(self) -> Result:
        if self.known is None:
            if self.arrived is not None:
                self.arrived.synchronize()  # the one wait for the device in an update
            self.known = self.finish(self.numbers.tolist())
        return self.known
