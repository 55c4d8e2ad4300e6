"""A batch enters; its gradient is added up, replayed as one recorded graph where a batch of these shapes came before.

On a GPU the forward and backward pass of a small model are a thousand kernels, which take longer to launch from Python
than to run. For that batches must have few different shapes: they are filled up with padding and idle rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from transduce.decoding.graphs import cloned, copy_into, tensors_of, warmed
from transduce.flow import Batch, Padded

COLUMNS = 8  # a source or target has a multiple of so many
MET = 3  # a shape is recorded when it comes for this time: rare ones are not worth it
MOST = 64  # recordings

Shapes = tuple[Any, ...]
Pass = Callable[[Batch, Tensor], Tensor]  # adds the gradient of a batch, its loss times the factor; gives sums


class Recorder:
    """Runs passes over batches, recorded where that pays. Gradients then stay where they are: zero them in place."""

    def __init__(self, run: Pass, parameters: Sequence[nn.Parameter]) -> None:
        self.run, self.parameters = run, parameters
        self.met: Counter[Shapes] = Counter()
        self.recordings: dict[Shapes, _Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, factor: Tensor) -> Tensor:
        key = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch))
        self.met[key] += 1
        if key not in self.recordings:
            if self.met[key] < MET or len(self.recordings) >= MOST:
                return self.run(batch, factor)
            self.recordings[key] = _Recording(self, batch, factor)
        return self.recordings[key].replay(batch, factor)


class _Recording:
    def __init__(self, owner: Recorder, batch: Batch, factor: Tensor) -> None:
        self.batch, self.factor = cloned(batch), factor.clone()
        before = [None if p.grad is None else p.grad.clone() for p in owner.parameters]
        warmed(lambda: owner.run(self.batch, self.factor))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=owner.pool):
            self.sums = owner.run(self.batch, self.factor)
        for parameter, grad in zip(owner.parameters, before, strict=True):
            if parameter.grad is not None:
                parameter.grad.zero_() if grad is None else parameter.grad.copy_(grad)

    def replay(self, batch: Batch, factor: Tensor) -> Tensor:
        copy_into([*tensors_of(self.batch), self.factor], [*tensors_of(batch), factor])
        self.graph.replay()
        return self.sums.clone()


def rounded(batch: Batch, budget: int) -> Batch:
    """The same pairs with round numbers of columns, and of rows, the last of which count nowhere.

    `budget` is the slots that a full batch has: a quarter of the rows that fit into it is the unit.
    """
    made = batch.map(lambda part: part.rounded(COLUMNS))
    columns = sum(part.values.size(1) for part in (made.source, made.target) if part is not None)
    extra = -batch.size % max(1, budget // columns // 4)
    made = batch.select(torch.cat((torch.arange(batch.size), torch.zeros(extra, dtype=torch.long))))
    made = made.map(lambda part: part.rounded(COLUMNS))
    if made.target is not None and extra:
        mask = made.target.mask.clone()
        mask[batch.size :] = False
        made = replace(made, target=Padded(made.target.values, mask))
    return made
