"""Continuous batching: searches whose free slots are filled with waiting sources.

In a batch of natural lengths most slots are empty for most of the steps: one long output holds all the others. Here a
search has a number of slots. When enough of them are free, the next sources enter together and are searched beside the
sources already there. Each finds what it finds in a batch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.attention.positions import max_positions
from transduce.contracts import LogitsProcessor, Strategy
from transduce.decoding.search import SearchLoop, SourceGroup, Stepper, search
from transduce.decoding.search_state import COLUMN_MULTIPLE, InputShape, SearchInput, padded_input
from transduce.flow import Batch, Hypothesis, LexicalConstraints, Padded
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.model import Transducer

# A group is 1/4 of the slots: smaller groups encode sources in small batches, larger ones leave slots free for longer.
# With 256 slots on a GPU, 2,014 lines took 134 ms with an eighth, 116 with a quarter, 111 with half (greedy), and 216,
# 190, 190 with a beam of 5.
GROUPS_PER_SEARCH = 4
MAX_LENGTH_RATIO = 2  # a search takes no sources shorter than 1/2 of its longest: they would compute padding
SHORT_SOURCE = 32  # length up to which that does not matter
SYNC_INTERVAL = 4  # replayed steps between two checks: a finished slot is idle until then


@dataclass(frozen=True)
class SearchRequest:
    """Sources that enter a search together, with the options of each."""

    batch: Batch
    max_lengths: Tensor  # G: maximal number of tokens
    prefix: Padded | None = None  # G P: forced first tokens
    seeds: Sequence[int] | None = None  # one per source, for sampling strategies
    constraints: LexicalConstraints | None = None  # of a search in one batch; continuous ones have none


@dataclass(frozen=True)
class SearchPlan:
    """One search over many sources."""

    slots: int
    groups: list[list[int]]  # rows that enter together, in order


def plan_searches(lengths: Sequence[int], budget: int, max_slots: int | None = None) -> list[SearchPlan]:
    """Searches over sources of these lengths, longest first, each within a budget of slots times source length."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    searches: list[SearchPlan] = []
    while order:
        longest = max(lengths[order[0]], 1)
        slots = _round_down(max(min(budget // longest, max_slots or budget), 1))
        similar = len(order)
        if longest > SHORT_SOURCE:
            similar = sum(lengths[row] * MAX_LENGTH_RATIO >= longest for row in order)
        rows, order = order[: max(similar, slots)], order[max(similar, slots) :]
        slots = min(slots, len(rows))
        size = -(-slots // GROUPS_PER_SEARCH)
        searches.append(SearchPlan(slots, [rows[first : first + size] for first in range(0, len(rows), size)]))
    return searches


def _round_down(slots: int) -> int:
    """Few different numbers of slots, so that a captured graph is used again."""
    return slots - slots % max(1, 2 ** (slots.bit_length() - 3))


@torch.inference_mode()
def continuous_search(
    model: Transducer,
    requests: Sequence[SearchRequest],
    strategy: Strategy,
    *,
    slots: int,
    processors: Sequence[LogitsProcessor] = (),
    nbest: int | None = None,  # hypotheses of each source to return; None: N
    graphs: SearchGraphs | None = None,  # captured steps of this model, on devices that have them
) -> list[list[Hypothesis]]:
    """The results of `search` for the sources of all requests in order, found in one search.

    No request has more sources than there are slots; all have a prefix or none.
    """
    max_length = max(int(one.max_lengths.max()) for one in requests)
    prefixed = any(one.prefix is not None for one in requests)
    options: dict[str, Any] = {"nbest": nbest, "prefixed": prefixed, "capturable": graphs is not None}
    stepper = Stepper(model, strategy, processors, max_length=max_length, **options)
    device, shape = next(model.parameters()).device, _shape(requests, stepper)
    groups, count = [], 0
    for request in requests:
        numbers = torch.arange(count, count + request.batch.size)
        groups.append(SourceGroup(numbers, partial(_input, stepper, request, shape, device)))
        count += request.batch.size
    loop = SearchLoop(stepper, graphs, nbest, sync_interval=SYNC_INTERVAL)
    loop.run_continuous(groups, slots)
    results = loop.hypotheses(count)
    for group, request in zip(loop.rejected, requests[len(requests) - len(loop.rejected) :], strict=True):
        found = search(
            model,
            request.batch.to(device),
            strategy,
            max_lengths=request.max_lengths,
            processors=processors,
            prefix=None if request.prefix is None else request.prefix.to(device),
            seeds=request.seeds,
            nbest=nbest,
            graphs=graphs,
        )
        for number, hypotheses in zip(group.sources.tolist(), found, strict=True):
            results[number] = hypotheses
    return results


def _shape(requests: Sequence[SearchRequest], stepper: Stepper) -> InputShape:
    """The common padded shape of all requests, with rounded columns where steps are captured."""
    limit, multiple = (max_positions(stepper.model), COLUMN_MULTIPLE) if stepper.capturable else (None, 1)

    def columns(parts: list[Padded | None]) -> int:
        return max((part.pad_to_multiple(multiple, limit).values.size(1) for part in parts if part), default=0)

    sources = columns([one.batch.source for one in requests])
    return InputShape(max(one.batch.size for one in requests), sources, columns([one.prefix for one in requests]))


def _input(stepper: Stepper, request: SearchRequest, shape: InputShape, device: torch.device) -> SearchInput:
    given = stepper.input(request.batch, request.max_lengths, request.prefix, request.seeds)
    shape = shape if stepper.capturable else replace(shape, sources=request.batch.size)
    return padded_input(given, shape).to(device)
