"""Continuous batching: searches whose free slots are filled with waiting sources.

In a batch of natural lengths most slots are empty for most of the steps: one long output holds all the others. Here a
search has a number of slots. When enough of them are free, the next sources enter together and are searched beside the
sources already there. Each finds what it finds in a batch of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.attention.positions import max_positions
from transduce.contracts import LogitsProcessor, Strategy
from transduce.decoding.search import FREE, SearchLoop, SourceGroup, Stepper, common_prefix, search, unshared
from transduce.decoding.search_state import COLUMN_MULTIPLE, InputShape, SearchInput, padded_input
from transduce.flow import Batch, Hypothesis, LexicalConstraints, Padded
from transduce.kernels.beam_update import BeamState, FinishedHypotheses
from transduce.kernels.cuda_graph import SearchGraphs
from transduce.kernels.host_copies import HostCopies
from transduce.model import Transducer

# A group is 1/4 of the slots: smaller groups encode sources in small batches, larger ones leave slots free for longer.
# With 256 slots on a GPU, 2,014 lines took 134 ms with an eighth, 116 with a quarter, 111 with half (greedy), and 216,
# 190, 190 with a beam of 5.
GROUPS_PER_SEARCH = 4
MAX_LENGTH_RATIO = 2  # a search takes no sources shorter than 1/2 of its longest: they would compute padding
SHORT_SOURCE = 32  # length up to which that does not matter
SYNC_INTERVAL = 4  # replayed steps between two checks: a finished slot is idle until then
LAUNCHED_STEPS = 4  # of an open search, which launches the next ones while a device computes these


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


@dataclass(frozen=True)
class LaunchedSteps:
    """Steps of an open search that a device computes."""

    copies: HostCopies  # the scores after these steps, as in `BeamState.totals`, and the finished hypotheses
    entered: list[int]  # sources that entered later


TRIM_COLUMNS = 32  # columns of histories that no source needs any more, and that are removed at once


@dataclass(frozen=True)
class SearchShape:
    """Sizes of an open search: what the sources that enter it may need."""

    slots: int  # sources at the same time
    source_columns: int  # tokens of a source
    prefix_columns: int  # forced tokens; 0: the sources have none
    max_length: int  # tokens of an output


class OpenSearch(SearchLoop):
    """A search without end: sources enter it and leave it between two steps, as a server needs.

    Each finds what it finds in a batch of its own. On a CPU the batch grows and shrinks with its sources, up to the
    number of slots; captured steps have all slots at once.
    """

    def __init__(
        self,
        model: Transducer,
        strategy: Strategy,
        shape: SearchShape,
        *,
        processors: Sequence[LogitsProcessor] = (),
        nbest: int | None = None,
        graphs: SearchGraphs | None = None,
    ) -> None:
        graphs = None if strategy.coverage_penalty else graphs
        options: dict[str, Any] = {"prefixed": shape.prefix_columns > 0, "capturable": graphs is not None}
        stepper = Stepper(model, strategy, processors, max_length=shape.max_length, nbest=nbest, **options)
        super().__init__(stepper, graphs, nbest, sync_interval=LAUNCHED_STEPS)
        self.shape, self.aligned = shape, False
        self.refills = True  # False: sources enter only when no other is left
        self.device = next(model.parameters()).device
        self._beams: BeamState | None = None
        self._launched: deque[LaunchedSteps] = deque()
        self._host_copy: BeamState | None = None  # of the hypotheses, while they do not change
        self._first_capacity = stepper.capacity

    @property
    def active(self) -> int:
        """Sources in the search."""
        return int(np.count_nonzero(self.sources.numpy() != FREE))  # in an eighth of the time of a sum by torch

    @property
    def free(self) -> int:
        """Sources that may enter together now. Where steps are captured, groups have one size."""
        active, capturable = self.active, self.stepper.capturable
        free = self.shape.slots - active if self.refills or not active else 0
        return min(free, self._group_size) if capturable else free

    @property
    def _group_size(self) -> int:
        return -(-self.shape.slots // GROUPS_PER_SEARCH)

    @torch.inference_mode()
    def add(self, numbers: Sequence[int], request: SearchRequest) -> bool:
        """Begins these sources; False: they cannot enter beside the ones of the search, and have to wait."""
        capturable, self._host_copy = self.stepper.capturable, None
        shape = InputShape(self._group_size, self.shape.source_columns, self.shape.prefix_columns)
        group = SourceGroup(torch.tensor(numbers), partial(_input, self.stepper, request, shape, self.device))
        if self._beams is None and not capturable:
            given = group.input()
            beams = self.start(given)
            self._beams = replace(beams, state=unshared(beams.state, given.batch))
            self.sources, self.length = group.sources, 1
            return True
        self.waiting.append(group)
        for steps in self._launched:
            steps.entered.extend(numbers)
        beams = self._with_room(self._open(group) if self._beams is None else self._beams, len(numbers))
        self._beams, _ = self._admit(beams, self.sources != FREE)
        if self.rejected:
            self.rejected, self.refills = [], False
            return False
        return True

    def _open(self, group: SourceGroup) -> BeamState:
        """The buffers of captured steps, with all slots free."""
        make, slots = partial(self.stepper.empty_slots, self.shape.slots), self.shape.slots
        given = group.input()
        if self.graphs is not None:
            self.graph = self.graphs.graph_for(make, given, key=(self.stepper.key, slots), capturable=False)
        beams = make(given) if self.graph is None else self.graph.values
        beams.totals.fill_(-torch.inf)
        self.sources = torch.full((slots,), FREE)
        return beams

    def _with_room(self, beams: BeamState, entering: int) -> BeamState:
        """The search with slots for more sources, and without columns that no source needs any more."""
        size, needed = len(self.sources), self.active + entering
        if self.stepper.capturable:
            return beams
        columns = max(int((beams.lengths * beams.active).max()), self.shape.prefix_columns + 1)
        if beams.history.size(2) - columns >= TRIM_COLUMNS:
            beams = _trimmed(beams, columns)
        if needed <= size:
            return beams
        grown = min(max(needed, 2 * size), self.shape.slots)
        self.sources = torch.cat((self.sources, torch.full((grown - size,), FREE)))
        beams = beams.select_sources(torch.arange(grown, device=self.device) % size, owned=False)
        return replace(beams, totals=beams.totals.index_fill(0, torch.arange(size, grown).to(self.device), -torch.inf))

    @torch.inference_mode()
    def launch(self) -> bool:
        """Begins the steps of the next `advance` that has none, where they are captured; False: nowhere.

        It does not wait for them. Sources that are added until then enter after these steps.
        """
        if self.graph is None or self._beams is None or not self.active:
            return False
        self._beams = self._step(self._beams)
        hypotheses = [values[:, : self.nbest] for values in vars(self._beams.finished).values()]
        self._launched.append(LaunchedSteps(HostCopies([self._beams.totals, *hypotheses]), []))
        return True

    @property
    def launches(self) -> int:
        """How often `launch` was called without an `advance` for it."""
        return len(self._launched)

    @property
    def computing(self) -> bool:
        """Whether the device still computes the steps of the next `advance`."""
        return bool(self._launched) and not self._launched[0].copies.complete

    @torch.inference_mode()
    def advance(self) -> list[int]:
        """One step of all sources; those that are finished leave the search. `take_results` has their hypotheses."""
        launched, self._host_copy = self._launched.popleft() if self._launched else None, None
        if self._beams is None or not self.active:
            return []
        if launched is not None:
            return self._leave_after(launched)
        beams = self._step(self._beams) if self._beams.active.any() else self._beams
        active = beams.active.cpu()
        ended = (~active & (self.sources != FREE)).nonzero().flatten()
        numbers: list[int] = self.sources[ended].tolist()
        if numbers:
            self._collect(beams, ended)
            self.sources[ended] = FREE
        self._leave(beams, active)
        return numbers

    def _leave_after(self, steps: LaunchedSteps) -> list[int]:
        """The sources that have ended in launched steps leave. Their hypotheses are on the host already."""
        totals, *hypotheses = steps.copies.wait()
        sources = self.sources.numpy()  # an operation of torch would give other threads their turn
        active = (totals.numpy() > -np.inf).any(1) | np.isin(sources, steps.entered)
        ended = np.flatnonzero(~active & (sources != FREE))
        numbers: list[int] = sources[ended].tolist()
        if numbers:
            rows = torch.from_numpy(ended)
            self.results.append((torch.tensor(numbers), FinishedHypotheses(*(values[rows] for values in hypotheses))))
            sources[ended] = FREE
        return numbers

    def _leave(self, beams: BeamState, active: Tensor) -> None:
        if active.any():
            self._beams = self._compacted(beams, active)
        elif not self.stepper.capturable:  # the next sources begin with small caches
            self._beams, self.stepper.capacity, self.sources = None, self._first_capacity, torch.tensor([])

    @torch.inference_mode()
    def cancel(self, numbers: Sequence[int]) -> None:
        """Removes these sources; their slots are free at once."""
        slots = torch.isin(self.sources, torch.tensor(numbers)).nonzero().flatten()
        if self._beams is None or not len(slots):
            return
        self._host_copy = None
        self._beams.totals.index_fill_(0, slots.to(self.device), -torch.inf)
        self.sources[slots] = FREE
        if not self.stepper.capturable:
            self._leave(self._beams, self._beams.active.cpu())

    def certain(self, number: int) -> list[tuple[int, float]]:
        """The tokens, with scores, that the output of a source begins with whatever follows."""
        slots = (self.sources == number).nonzero().flatten().tolist()
        if self._beams is None or not slots:
            return []
        if self._host_copy is None:
            self._host_copy = _on_host(self._beams)
        return common_prefix(self._host_copy, slots[0])


def _on_host(beams: BeamState) -> BeamState:
    """The hypotheses of all sources, copied together: every read of a single one would wait for the device."""
    finished = FinishedHypotheses(*(part.cpu() for part in vars(beams.finished).values()))
    copied = {name: getattr(beams, name).cpu() for name in ("history", "token_scores", "totals", "lengths")}
    return replace(beams, finished=finished, **copied)


def _trimmed(beams: BeamState, columns: int) -> BeamState:
    """The last columns of all histories."""
    finished = beams.finished
    finished = replace(finished, ids=finished.ids[..., -columns:], token_scores=finished.token_scores[..., -columns:])
    history, scores = beams.history[..., -columns:], beams.token_scores[..., -columns:]
    return replace(beams, history=history, token_scores=scores, finished=finished)
