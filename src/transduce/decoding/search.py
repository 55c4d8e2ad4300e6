"""Search: the token loop of every strategy and every model; scoring of given targets, mask filling.

Simultaneous decoding (simultaneous.py) has a loop of its own: its source grows between two tokens.

Where steps are captured as CUDA graphs, every tensor of the search keeps its shape and nothing waits for the host, so a
step is one function of fixed buffers: it runs as it is, or replayed (kernels/cuda_graph.py). On a CPU histories grow.
They are padded on the left: the newest token is always the last column. Finished sources leave the batch, or waiting
ones take their slots (continuous_batching.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from transduce.attention.positions import max_positions
from transduce.contracts import LogitsProcessor, Selection, Strategy
from transduce.decoders.ctc import best_paths
from transduce.decoding.logits_processors import LOWEST_LOG_PROB, NEVER_GENERATED, constrained_scores, select_from_banks
from transduce.decoding.search_state import (
    SearchInput,
    initial_beams,
    padded_input,
    prefill,
    rounded_shape,
    step_attention,
    uniform_noise,
)
from transduce.decoding.strategies import Beam, BestPath, length_power
from transduce.flow import (
    BOS,
    EOS,
    UNK,
    Batch,
    Hypothesis,
    LexicalConstraints,
    Padded,
    State,
    Step,
    TopK,
    TopKRequest,
    copied_to,
    map_tensors,
)
from transduce.kernels.beam_update import (
    BEAM_UPDATE,
    BeamState,
    FinishedHypotheses,
    StateMismatchError,
    compaction_threshold,
    histories_grow,
)
from transduce.kernels.cuda_graph import SearchGraph, SearchGraphs, storages, tensors_of
from transduce.kernels.host_copies import pins_copies
from transduce.kernels.native.inference import MAX_K
from transduce.model import NEVER, CTCModel, EncoderOnly, Transducer

INITIAL_CAPACITY = 32  # positions of the first KV caches of a search; they double


@dataclass(frozen=True)
class SearchStep:
    """One selection of a search, as an observer sees it."""

    before: BeamState
    log_probs: Tensor  # B N V: of every token after each row; -inf for a token that is never generated
    selection: Selection
    after: BeamState


class Stepper:
    """The step of a search: a model, a strategy and logits processors."""

    def __init__(
        self,
        model: Transducer,
        strategy: Strategy,
        processors: Sequence[LogitsProcessor],
        *,
        max_length: int,
        nbest: int | None,  # hypotheses of each source to return; None: N
        prefixed: bool,
        capturable: bool,  # True: every tensor keeps its shape, so that a step can be captured
        constrained: bool = False,  # True: the sources have lexical constraints
        observer: Callable[[SearchStep], None] | None = None,  # called after every selection
    ) -> None:
        self.model, self.strategy, self.processors = model, strategy, processors
        self.prefixed, self.capturable, self.observer = prefixed, capturable, observer
        # A captured step needs its full caches at once, in few different sizes; elsewhere positions that may never be
        # used would only cost time.
        self.max_length = -(-max_length // INITIAL_CAPACITY) * INITIAL_CAPACITY if capturable else max_length
        self.capacity = self.max_length if capturable else min(max_length, INITIAL_CAPACITY - 1)  # and <s>
        # Constraints and observers need the scores of all tokens; a coverage penalty needs attention, which no top-k
        # step returns.
        all_logits = constrained or observer is not None or strategy.coverage_penalty > 0
        self.top_k = model.top_k if 0 < strategy.candidates <= MAX_K and not all_logits else None
        self.length_power = length_power(strategy)
        self.num_results = min(nbest or strategy.width, strategy.width) if strategy.exact else strategy.width

    @property
    def key(self) -> Hashable:
        """Identifies a captured graph of one model and one set of shapes."""
        return self.strategy, tuple(self.processors), self.max_length, self.num_results

    def input(
        self, batch: Batch, max_lengths: Tensor, prefix: Padded | None, seeds: Sequence[int] | None
    ) -> SearchInput:
        noise = None
        if self.strategy.random:
            noise = uniform_noise(seeds or range(batch.size), self.max_length, self.strategy.width).to(batch.device)
        columns = 0 if histories_grow(batch.device) and not self.capturable else self.max_length
        return SearchInput(batch, max_lengths.to(batch.device), prefix, noise, self.max_length, columns)

    def begin(self, given: SearchInput) -> BeamState:
        """The search after its first selection."""
        if self.top_k is not None and given.prefix is None:
            suppressed = _suppressed(self.processors, 0)
            if suppressed is not None:
                beams = initial_beams(self.model, self.strategy, given, self.capacity)
                first = torch.full((beams.totals.numel(), 1), BOS, device=beams.totals.device)
                return self._top_k_step(beams, first, suppressed)
        beams, logits = prefill(self.model, self.strategy, given, self.capacity)
        return self._update_from_logits(beams, logits)

    def step(self, beams: BeamState, length: int | None) -> BeamState:
        """The search after one more selection; `length`: tokens of every row so far, None: rows differ."""
        tokens = beams.history[..., -1].reshape(-1, 1)
        if (suppressed := self.suppressed(length)) is not None:
            return self._top_k_step(beams, tokens, suppressed)
        covers = beams.coverage is not None
        step = self.model.advance(tokens, beams.state, with_attention=covers)
        beams = replace(beams, state=step.state)
        if beams.coverage is not None:
            beams = replace(beams, coverage=beams.coverage + step_attention(step).view_as(beams.coverage))
        return self._update_from_logits(beams, step.logits[:, -1])

    def empty_slots(self, slots: int, given: SearchInput) -> BeamState:
        """A search with this number of free slots for sources like these."""
        return self.begin(given).empty_slots(slots)

    def insert(self, beams: BeamState, given: tuple[SearchInput, Tensor]) -> BeamState:
        """The search with new sources, after their first selection, in these slots."""
        new, slots = given
        return beams.replace_sources(slots, self.begin(new))

    def suppressed(self, length: int | None) -> tuple[int, ...] | None:
        """Tokens suppressed after `length` tokens, if the top k suffice for the step; None: all logits are needed."""
        if self.top_k is None:
            return None
        return self._always_suppressed if self.prefixed or length is None else _suppressed(self.processors, length)

    @cached_property
    def _always_suppressed(self) -> tuple[int, ...] | None:
        """Tokens suppressed at every length; None: they change with the length, or processors do more."""
        first = _suppressed(self.processors, 1)
        lengths = range(2, self.max_length) if self.processors else ()
        return first if all(_suppressed(self.processors, length) == first for length in lengths) else None

    def grow_cache(self, beams: BeamState) -> BeamState:
        """The same search with twice the cache capacity."""
        more = 1 + self.capacity
        self.capacity += more
        return replace(beams, state=self.model.reserve(beams.state, more, self.strategy.width))

    def _top_k_step(self, beams: BeamState, tokens: Tensor, suppressed: tuple[int, ...]) -> BeamState:
        request = TopKRequest(self.strategy.candidates, suppressed, (beams.totals > -torch.inf).flatten())
        assert self.top_k is not None
        return self._update_from_top_k(beams, self.top_k(tokens, beams.state, request))

    def _update_from_top_k(self, beams: BeamState, best: TopK) -> BeamState:
        """Selects among the best tokens of each row and updates the beams."""
        shape = (*beams.totals.shape, -1)
        selection = self.strategy.select_top_k(beams.totals, best.log_probs.view(shape), best.tokens.view(shape))
        assert selection.indices is not None
        log_probs = best.log_probs.view(len(beams.totals), -1).gather(1, selection.indices)  # B N
        return self._update(replace(beams, state=best.state), selection, log_probs)

    def _update_from_logits(self, beams: BeamState, logits: Tensor) -> BeamState:
        """Selects a token for every row (logits R V) and updates the beams."""
        log_probs = logits.log_softmax(-1, dtype=torch.float)
        if beams.constraints is not None:
            return self._constrained_update(beams, log_probs.clamp(min=LOWEST_LOG_PROB))
        allowed = NEVER_GENERATED.apply(log_probs, beams.history)  # in place: a suppressed token is never selected
        for processor in self.processors:
            allowed = processor.apply(allowed, beams.history.flatten(0, 1))
        selection = self.strategy.select(beams.totals, allowed.view(*beams.totals.shape, -1), _noise(beams))
        return self._update_selected(beams, selection, log_probs)

    def _constrained_update(self, beams: BeamState, log_probs: Tensor) -> BeamState:
        """The same where every output has phrases that it must or must not contain."""
        allowed = NEVER_GENERATED.apply(log_probs.clone(), beams.history)
        for processor in self.processors:
            allowed = processor.apply(allowed, beams.history.flatten(0, 1))
        shape = (*beams.totals.shape, -1)
        banks = isinstance(self.strategy, Beam)
        scores, progress = constrained_scores(beams, allowed.view(shape), log_probs.view(shape), competing=banks)
        if banks:
            selection = select_from_banks(beams, scores, progress, self.strategy.width)
        else:
            selection = self.strategy.select(beams.totals, scores, _noise(beams))
        return self._update_selected(beams, selection, log_probs)

    def _update_selected(self, beams: BeamState, selection: Selection, log_probs: Tensor) -> BeamState:
        """Updates the beams with the log-probabilities (R V) of the selected tokens."""
        log_probs = log_probs.view(*beams.totals.shape, -1)
        if selection.parents.size(1) == 1:
            selected = log_probs.squeeze(1).gather(1, selection.tokens)
        else:
            sources = torch.arange(len(log_probs), device=log_probs.device)[:, None]
            selected = log_probs[sources, selection.parents, selection.tokens]
        updated = self._update(beams, selection, selected)
        if self.observer is not None:
            self.observer(SearchStep(beams, log_probs, selection, updated))
        return updated

    def _update(self, beams: BeamState, selection: Selection, log_probs: Tensor) -> BeamState:
        updated: BeamState = BEAM_UPDATE(
            self.strategy, beams, selection, log_probs, self.num_results, self.length_power
        )
        return updated


def _noise(beams: BeamState) -> Tensor | None:
    """B N: the random numbers of this step."""
    if beams.noise is None:
        return None
    index = beams.steps[:, None, None].expand(-1, 1, beams.noise.size(2))
    return beams.noise.gather(1, index).squeeze(1)


def _suppressed(processors: Sequence[LogitsProcessor], length: int) -> tuple[int, ...] | None:
    """Tokens suppressed after `length` tokens, where processors do no more than suppress tokens."""
    suppressed = [processor.suppressed(length) for processor in (NEVER_GENERATED, *processors)]
    return None if any(one is None for one in suppressed) else tuple(token for one in suppressed for token in one or ())


SYNC_INTERVAL = 8  # replayed steps between two checks of which sources are active: a check waits for the device
FREE = -1  # in a slot without a source


@torch.inference_mode()
def search(
    model: Transducer,
    batch: Batch,
    strategy: Strategy,
    *,
    max_lengths: Tensor,  # B: maximal number of tokens of each source
    processors: Sequence[LogitsProcessor] = (),
    prefix: Padded | None = None,  # B P: forced first tokens
    seeds: Sequence[int] | None = None,  # one per source, for sampling strategies
    nbest: int | None = None,  # hypotheses of each source to return; None: N
    graphs: SearchGraphs | None = None,  # captured steps of this model, on devices that have them
    constraints: LexicalConstraints | None = None,  # such a search is not captured, nor one with a coverage penalty
) -> list[list[Hypothesis]]:
    """Hypotheses of each source, best first (fewer than requested where the space is smaller)."""
    changed = bool(processors) or prefix is not None or constraints is not None
    if isinstance(strategy, BestPath) and isinstance(model, CTCModel) and not changed:
        return [[one] for one in _best_paths(model, batch, max_lengths)]
    graphs = graphs if constraints is None and not strategy.coverage_penalty else None
    options: dict[str, Any] = {"nbest": nbest, "prefixed": prefix is not None, "capturable": graphs is not None}
    options["constrained"] = constraints is not None
    stepper = Stepper(model, strategy, processors, max_length=int(max_lengths.max()), **options)
    given = replace(stepper.input(batch, max_lengths, prefix, seeds), constraints=constraints)
    if graphs is not None:
        given = padded_input(given, rounded_shape(given, max_positions(model)))
    loop = SearchLoop(stepper, graphs, nbest)
    loop.run(*loop.enter(given, batch))
    return loop.hypotheses(batch.size)


@torch.inference_mode()
def stream_search(
    model: Transducer,
    batch: Batch,
    strategy: Strategy,
    *,
    max_lengths: Tensor,  # 1
    processors: Sequence[LogitsProcessor] = (),
    prefix: Padded | None = None,
    seeds: Sequence[int] | None = None,
) -> Iterator[tuple[int, float]]:
    """The best hypothesis of one source, token by token with log-probabilities, as `search` finds it.

    A token is given as soon as it is certain: when all hypotheses of the search have it. Of greedy search and sampling
    that is at once.
    """
    assert batch.size == 1, "a stream is of one source"
    options: dict[str, Any] = {"nbest": 1, "prefixed": prefix is not None, "capturable": False}
    stepper = Stepper(model, strategy, processors, max_length=int(max_lengths.max()), **options)
    loop, given = SearchLoop(stepper, None, 1), 0
    for beams in loop.steps(*loop.enter(stepper.input(batch, max_lengths, prefix, seeds), batch)):
        certain = common_prefix(beams)
        yield from certain[given:]
        given = max(given, len(certain))
    (best,) = loop.hypotheses(1)[0][:1]
    yield from list(zip(best.ids, best.token_scores, strict=True))[given:]


@torch.inference_mode()
def observed_search(
    model: Transducer,
    batch: Batch,
    strategy: Strategy,
    *,
    max_lengths: Tensor,  # 1
    processors: Sequence[LogitsProcessor] = (),
    prefix: Padded | None = None,
    seeds: Sequence[int] | None = None,
) -> Generator[SearchStep, None, list[Hypothesis]]:
    """Every selection of the search of one source, as it is made; returns the N best hypotheses."""
    assert batch.size == 1, "one source is observed at a time"
    seen: deque[SearchStep] = deque()
    options: dict[str, Any] = {"nbest": None, "prefixed": prefix is not None, "capturable": False}
    stepper = Stepper(model, strategy, processors, max_length=int(max_lengths.max()), observer=seen.append, **options)
    loop = SearchLoop(stepper, None, None)
    for _ in loop.steps(*loop.enter(stepper.input(batch, max_lengths, prefix, seeds), batch)):
        while seen:
            yield seen.popleft()
    while seen:  # the selection that ended the search
        yield seen.popleft()
    return loop.hypotheses(1)[0]


def common_prefix(beams: BeamState, slot: int = 0) -> list[tuple[int, float]]:
    """The first tokens, with their scores, of all hypotheses of the source in a slot."""
    rows = []
    length = int(beams.lengths[slot])
    for row in (beams.totals[slot] > -torch.inf).nonzero().flatten().tolist():
        rows.append((beams.history[slot, row].tolist()[-length:], beams.token_scores[slot, row].tolist()[-length:]))
    finished = beams.finished
    for row in (finished.ranks[slot] > -torch.inf).nonzero().flatten().tolist():
        size = int(finished.lengths[slot, row])
        rows.append((finished.ids[slot, row].tolist()[-size:], finished.token_scores[slot, row].tolist()[-size:]))
    return common_tokens(rows)


def common_tokens(rows: Sequence[tuple[list[int], list[float]]]) -> list[tuple[int, float]]:
    """The first tokens, with the scores of the first row, that all rows of tokens and scores have."""
    common = 0
    for tokens in zip(*(ids for ids, _ in rows), strict=False):
        if len(set(tokens)) > 1:
            break
        common += 1
    ids, scores = rows[0]
    return list(zip(ids[:common], scores[:common], strict=True))


def _best_paths(model: CTCModel, batch: Batch, max_lengths: Tensor) -> list[Hypothesis]:
    """The text of the best path of each source, with its probability over all paths."""
    state = model.start(batch)
    found = best_paths(state.fixed)
    limits = max_lengths.tolist()
    complete = [len(ids) < limit for ids, limit in zip(found, limits, strict=True)]
    rows = [[*ids, EOS][:limit] for ids, limit in zip(found, limits, strict=True)]
    labels = Padded.from_rows(rows).to(batch.device)
    begin = torch.full_like(labels.values[:, :1], BOS)
    step = model.advance(torch.cat((begin, labels.values[:, :-1]), 1), state)
    scores = step.logits.log_softmax(-1).gather(-1, labels.values[..., None]).squeeze(-1)  # B T
    return [
        Hypothesis(tuple(ids), tuple(row[: len(ids)]), math.fsum(row[: len(ids)]), done)
        for ids, row, done in zip(rows, scores.tolist(), complete, strict=True)
    ]


@dataclass(frozen=True)
class SourceGroup:
    """Sources that enter a search together."""

    sources: Tensor  # G: their numbers
    input: Callable[[], SearchInput]  # built when they enter


class SearchLoop:
    """A search from its first step to its last: which sources are in it, leave it and enter it."""

    def __init__(
        self, stepper: Stepper, graphs: SearchGraphs | None, nbest: int | None, *, sync_interval: int = SYNC_INTERVAL
    ) -> None:
        self.stepper, self.graphs, self.nbest, self.sync_interval = stepper, graphs, nbest, sync_interval
        self.graph: SearchGraph[Any, BeamState] | None = None  # captured steps
        self.sources = torch.tensor([])  # B: the number of the source in each slot; FREE: none
        self.waiting: deque[SourceGroup] = deque()  # enter as soon as enough slots are free
        self.rejected: list[SourceGroup] = []  # could not enter: their states have another form
        self.results: list[tuple[Tensor, FinishedHypotheses]] = []  # numbers of sources, and their hypotheses
        self.length = 1  # tokens of the sources that entered first
        self.aligned = True  # all sources entered at the same time

    def enter(self, given: SearchInput, batch: Batch) -> tuple[BeamState, Tensor]:
        """The search of a batch after its first selection, and the number of the source in each slot."""
        beams = self.start(given)
        if self.graph is None:
            beams = replace(beams, state=unshared(beams.state, batch))
        free = torch.full((given.batch.size - batch.size,), FREE)
        return beams, torch.cat((torch.arange(batch.size), free))

    def run(self, beams: BeamState, sources: Tensor) -> None:
        """All steps of a search."""
        deque(self.steps(beams, sources), maxlen=0)

    def steps(self, beams: BeamState, sources: Tensor) -> Iterator[BeamState]:
        """The token loop: the search before each step, while a source is left."""
        self.sources = sources
        current = self._exchange_sources(beams)
        while current is not None:
            yield current
            current = self._exchange_sources(self._step(current))

    def _step(self, beams: BeamState) -> BeamState:
        """The search after one step, or after all steps replayed between two checks."""
        if self.graph is not None and not self.aligned:
            self._replay(None, self.sync_interval)
            return beams
        if self.graph is not None:
            for _ in range(self.sync_interval):
                if not self._replay(self.length, 1):
                    break
            return beams
        if self.length == self.stepper.capacity and not self.stepper.capturable:
            beams = self.stepper.grow_cache(beams)
        self.length += 1
        return self.stepper.step(beams, self.length - 1 if self.aligned else None)

    def _replay(self, length: int | None, count: int) -> bool:
        """Captured steps; False: they could not be captured, and the search continues from the buffers without them."""
        assert self.graph is not None
        assert self.graphs is not None
        kind = self.stepper.suppressed(length)
        if not self.graphs.replay(self.graph, self.stepper.step, length, kind, count):
            self.graph = None
            return False
        self.length += count
        return True

    def _exchange_sources(self, beams: BeamState) -> BeamState | None:
        """The search before its next step: finished sources leave, waiting ones enter; None: no source is left."""
        active = beams.active.cpu()
        while self.waiting and len(active) - int(active.sum()) >= len(self.waiting[0].sources):
            beams, active = self._admit(beams, active)
        if not active.any():
            self._collect(beams, torch.arange(len(active)))
            return None
        return beams if self.waiting else self._compacted(beams, active)

    def _compacted(self, beams: BeamState, active: Tensor) -> BeamState:
        """The search without its finished sources, where removal costs less than to compute them on."""
        if self.stepper.capturable:
            return beams
        if int(active.sum()) <= compaction_threshold(beams, top_k=self.stepper.top_k is not None):
            self._collect(beams, (~active).nonzero().flatten())
            rows = _compaction(active)
            beams, self.sources = beams.select_sources(rows.to(beams.totals.device)), self.sources[rows]
        return beams

    def _collect(self, beams: BeamState, slots: Tensor) -> None:
        """Stores the finished hypotheses of these slots, still on the device."""
        slots = slots[self.sources[slots] != FREE]
        if len(slots):
            device = beams.totals.device
            index = copied_to(device, slots, pinned=pins_copies(device))
            finished = beams.finished.select_sources(index, self.nbest)
            self.results.append((self.sources[slots], finished))

    def _admit(self, beams: BeamState, active: Tensor) -> tuple[BeamState, Tensor]:
        """The next group in free slots, and which slots are active now."""
        group, device = self.waiting.popleft(), beams.totals.device
        slots, given = (~active).nonzero().flatten()[: len(group.sources)], group.input()
        self._collect(beams, slots)
        # With fixed shapes a small group is padded with its first source, which is written to one slot only.
        rows = torch.cat((slots, slots[:1].expand(given.batch.size - len(slots))))
        index = copied_to(device, rows, pinned=pins_copies(device))
        try:
            beams = self._insert(beams, given, index)
        except StateMismatchError:  # e.g. a user's decoder whose state grows
            self.rejected, self.waiting = [group, *self.waiting], deque()
            self.sources[slots] = FREE
            return beams, active
        self.sources[slots] = group.sources
        if self.graph is not None:  # do not wait for the device to learn that a source ended with its first token
            return beams, active.index_fill(0, slots, True)
        self.length = int((beams.steps * beams.active).max())
        return beams, beams.active.cpu()

    def _insert(self, beams: BeamState, given: SearchInput, slots: Tensor) -> BeamState:
        """Begins these sources in these slots; captured for the buffers of the search."""
        insert = partial(self.stepper.insert, beams)
        if self.graph is None or self.graphs is None:
            return insert((given, slots))
        key = (self.stepper.key, self.graph)
        graph = self.graphs.graph_for(insert, (given, slots), key=key, capturable=self.stepper.model.capturable)
        if graph is None:
            return insert((given, slots))
        graph.reset(insert, (given, slots))
        return beams

    def start(self, given: SearchInput) -> BeamState:
        """A search after its first selection, in its own buffers where steps are captured."""
        stepper = self.stepper
        if self.graphs is not None:
            self.graph = self.graphs.graph_for(
                stepper.begin, given, key=stepper.key, capturable=stepper.model.capturable
            )
        if self.graph is None:
            return stepper.begin(given)
        self.graph.reset(stepper.begin, given)
        return self.graph.values

    def run_continuous(self, groups: Sequence[SourceGroup], slots: int) -> None:
        """Runs with this number of slots, which the groups enter one after the other."""
        self.waiting, self.aligned = deque(groups), False
        make, given = partial(self.stepper.empty_slots, slots), groups[0].input()
        if self.graphs is not None:
            self.graph = self.graphs.graph_for(make, given, key=(self.stepper.key, slots), capturable=False)
        beams = make(given) if self.graph is None else self.graph.values
        beams.totals.fill_(-torch.inf)  # the buffers may hold sources of a search that an error interrupted
        self.run(beams, torch.full((slots,), FREE))

    def hypotheses(self, sources: int) -> list[list[Hypothesis]]:
        """The hypotheses of each source, copied to the host at once."""
        found = self.take_results()
        return [found.get(number, []) for number in range(sources)]

    def take_results(self) -> dict[int, list[Hypothesis]]:
        """The hypotheses of all collected sources by number, copied to the host at once. They are given once."""
        results = dict[int, list[Hypothesis]]()
        columns = max((finished.ids.size(2) for _, finished in self.results), default=0)
        found = [(numbers, *vars(finished.padded(columns)).values()) for numbers, finished in self.results]
        fields = [torch.cat(part).tolist() for part in zip(*found, strict=True)]
        self.results = []
        for source, *rows in zip(*fields, strict=True):
            results[source] = []
            for ids, scores, rank, length, complete in zip(*rows, strict=True):
                if rank > -torch.inf:
                    hypothesis = Hypothesis(tuple(ids[-length:]), tuple(scores[-length:]), rank, complete)
                    results[source].append(hypothesis)
        return results


def _compaction(active: Tensor) -> Tensor:
    """The active sources, each in its slot but for the last ones, which fill the slots of inactive ones."""
    left = int(active.sum())
    rows = torch.arange(left, device=active.device)
    rows[(~active[:left]).nonzero().flatten()] = left + active[left:].nonzero().flatten()
    return rows


def unshared(state: State, batch: Batch) -> State:
    """The state without storage shared with the batch: slots of finished sources are overwritten in place."""
    shared = storages(tensors_of(batch))

    def copied(x: Tensor) -> Tensor:
        return x.clone() if storages([x]) & shared or not x.is_contiguous() else x

    return replace(state, fixed={name: map_tensors(copied, tree) for name, tree in state.fixed.items()})


@torch.inference_mode()
def score(model: Transducer, batch: Batch) -> list[tuple[float, ...]]:
    """log p(y_t | y_<t, x) for each target token, </s> included; their sum is the score of a hypothesis."""
    gold = batch.labels
    logs = model(batch).logits.float().log_softmax(-1)
    chosen = logs.gather(-1, gold.values[..., None]).squeeze(-1)  # B T
    return [tuple(row[real].tolist()) for row, real in zip(chosen, gold.mask, strict=True)]


class MaskFilling(Transducer):
    """Predicts the masked tokens of a source and copies the others with probability 1: only the former are scored."""

    def __init__(self, inner: EncoderOnly) -> None:
        super().__init__()
        self.inner = inner

    def start(self, batch: Batch) -> State:
        assert batch.source is not None
        state = self.inner.start(batch)
        logits = state.fixed["logits"]  # B S V: one position for each token before </s>
        source = batch.source.values[:, : logits.size(1)]  # B S
        copied = torch.full_like(logits, NEVER).scatter(-1, source[..., None], 0.0)
        logits = torch.where((source != UNK)[..., None], copied, logits)
        return replace(state, fixed={**state.fixed, "logits": logits})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.inner.advance(tokens, state, mask, with_attention=with_attention)
