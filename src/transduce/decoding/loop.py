"""A model and a batch of sources in, the best hypotheses of each source out: the only token loop.

Where a step is recorded, every tensor of the search keeps its shape and nothing waits for the host, so a step is one
function of fixed buffers: it runs as it is, or replayed as a graph (see graphs.py). On a CPU histories grow. They are
padded on the left: the newest token is always the last column. Sources that are done leave their places, or others
that wait come into them (see refilling.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transduce.attention.positions import places as places_of
from transduce.contracts import Rule, Strategy
from transduce.decoding.beginning import filled, round_shape
from transduce.decoding.graphs import Graphs, Recording, tensors_of
from transduce.decoding.moves import Moves
from transduce.decoding.paths import Given, Live, Paths, UnlikeError
from transduce.flow import Batch, Hypothesis, Padded, State, map_tensors
from transduce.model import Transducer

LEAVE = 0.75  # on a GPU sources leave together, once no more than this share of them goes on: leaving copies the rest
HALF = 0.5  # the same where a model leaves rows out that are done: they are only carried along
LOOK = 8  # recorded steps between two looks at what goes on: a look waits for the device
FREE = -1  # in a place without a source


@torch.inference_mode()
def search(
    model: Transducer,
    batch: Batch,
    strategy: Strategy,
    *,
    longest: Tensor,  # B: most tokens for each source
    rules: Sequence[Rule] = (),
    prefix: Padded | None = None,  # B P: tokens that every hypothesis begins with
    seeds: Sequence[int] | None = None,  # one a source, for strategies that draw
    best: int | None = None,  # hypotheses of each source that are brought back; None: N
    graphs: Graphs | None = None,  # recorded steps of this model, on devices that have them
) -> list[list[Hypothesis]]:
    """Best first, for each source (fewer than asked for where the space is smaller)."""
    asked: dict[str, Any] = {"best": best, "prefixed": prefix is not None, "steady": graphs is not None}
    moves = Moves(model, strategy, rules, most=int(longest.max()), **asked)
    given = moves.given(batch, longest, prefix, seeds)
    if graphs is not None:
        given = filled(given, round_shape(given, places_of(model)))
    loop = Loop(moves, graphs, best)
    live = loop.start(given)
    if loop.recording is None:
        live = replace(live, state=_owned(live.state, batch))
    idle = torch.full((given.batch.size - batch.size,), FREE)
    loop.run(live, torch.cat((torch.arange(batch.size), idle)))
    return loop.hypotheses(batch.size)


@dataclass(frozen=True)
class Group:
    """Sources that come into a search together."""

    sources: Tensor  # G: their numbers
    given: Callable[[], Given]  # made when it is their turn


class Loop:
    """A search from its first step to its last: who is in it, who leaves, and who comes in."""

    def __init__(self, moves: Moves, graphs: Graphs | None, best: int | None, *, look: int = LOOK) -> None:
        self.moves, self.graphs, self.best, self.look = moves, graphs, best, look
        self.recording: Recording[Any, Live] | None = None  # of the steps, where they are recorded
        self.sources = torch.tensor([])  # B: the number of the source in each place, FREE: none
        self.waiting: deque[Group] = deque()  # who comes in, each when so many places are free
        self.apart: list[Group] = []  # who could not come in
        self.found: list[tuple[Tensor, Paths]] = []  # numbers of sources, and what ended of each
        self.taken = 1  # tokens chosen for those who are longest in it
        self.together = True  # all have come in at the same time

    def run(self, live: Live, sources: Tensor) -> None:
        """The only token loop."""
        self.sources = sources
        now = self._change(live)
        while now is not None:
            now = self._change(self._go_on(now))

    def _go_on(self, live: Live) -> Live:
        """The search one step on, or as many as are replayed between two looks."""
        if self.recording is not None and self.graphs is not None:
            for _ in range(self.look):
                said = self.taken if self.together else None
                if not self.graphs.replay(self.recording, self.moves.step, said, self.moves.banned(said)):
                    self.recording = None  # the buffers are as before this step, so it goes on from here
                    break
                self.taken += 1
            return live
        if self.taken == self.moves.room and not self.moves.steady:
            live = self.moves.enlarge(live)
        self.taken += 1
        return self.moves.step(live, self.taken - 1 if self.together else None)

    def _change(self, live: Live) -> Live | None:
        """The search before its next step: others in the places of those who are done; None: nobody is left."""
        going = live.going.cpu()
        while self.waiting and len(going) - int(going.sum()) >= len(self.waiting[0].sources):
            live, going = self._bring_in(live, going)
        left, size = int(going.sum()), len(going)
        if not left:
            self._take_out(live, torch.arange(size))
            return None
        if self.waiting or self.moves.steady:
            return live
        # On a CPU a row that is done costs as much as one that goes on, and only what fills its place is copied. But a
        # model that proposes leaves such rows out by itself.
        proposing = self.moves.proposing
        if left < size if live.totals.is_cpu and not proposing else left <= (HALF if proposing else LEAVE) * size:
            self._take_out(live, (~going).nonzero().flatten())
            rows = _closed_up(going)
            live, self.sources = live.keep(rows.to(live.totals.device)), self.sources[rows]
        return live

    def _take_out(self, live: Live, places: Tensor) -> None:
        """Keeps what was found for the sources in these places, still on the device: nobody waits for it."""
        places = places[self.sources[places] != FREE]
        if len(places):
            paths = live.finished.keep(places.to(live.totals.device), self.best)
            self.found.append((self.sources[places], paths))

    def _bring_in(self, live: Live, going: Tensor) -> tuple[Live, Tensor]:
        """The next group in free places; and who goes on now."""
        group, device = self.waiting.popleft(), live.totals.device
        places, given = (~going).nonzero().flatten()[: len(group.sources)], group.given()
        self._take_out(live, places)
        # Where shapes are steady, a group that is too small holds its first source again, which enters only once.
        index = torch.cat((places, places[:1].expand(given.batch.size - len(places)))).to(device)
        try:
            live = self._enter(live, given, index)
        except UnlikeError:  # a part of the user's own has states that grow, say
            self.apart, self.waiting = [group, *self.waiting], deque()
            self.sources[places] = FREE
            return live, going
        self.sources[places] = group.sources
        if self.recording is not None:  # nobody waits for the device to hear that a line ended with its first token
            return live, going.index_fill(0, places, True)
        self.taken = int((live.drawn * live.going).max())
        return live, live.going.cpu()

    def _enter(self, live: Live, given: Given, places: Tensor) -> Live:
        """Begins these sources in these places; recorded for the buffers that they come into."""
        enter = partial(self.moves.enter, live)
        if self.recording is None or self.graphs is None:
            return enter((given, places))
        key = (self.moves.key, self.recording)
        recording = self.graphs.recording(enter, (given, places), key=key, steady=self.moves.model.steady)
        if recording is None:
            return enter((given, places))
        recording.start(enter, (given, places))
        return live

    def start(self, given: Given) -> Live:
        """A search after its first choice, in buffers of its own where its steps are recorded."""
        moves = self.moves
        if self.graphs is not None:
            self.recording = self.graphs.recording(moves.begin, given, key=moves.key, steady=moves.model.steady)
        if self.recording is None:
            return moves.begin(given)
        self.recording.start(moves.begin, given)
        return self.recording.values

    def refill(self, groups: Sequence[Group], places: int) -> None:
        """Runs with so many places, into which the groups come one after the other."""
        self.waiting, self.together = deque(groups), False
        make, given = partial(self.moves.idle, places), groups[0].given()
        if self.graphs is not None:
            self.recording = self.graphs.recording(make, given, key=(self.moves.key, places), steady=False)
        live = make(given) if self.recording is None else self.recording.values
        live.totals.fill_(-torch.inf)  # an earlier search, ended by an error, may have left some in a recording
        self.run(live, torch.full((places,), FREE))

    def hypotheses(self, sources: int) -> list[list[Hypothesis]]:
        """What was found for each of so many sources, brought to the host in one go."""
        results: list[list[Hypothesis]] = [[] for _ in range(sources)]
        wide = max((paths.ids.size(2) for _, paths in self.found), default=0)
        found = [(numbers, *vars(paths.widened(wide)).values()) for numbers, paths in self.found]
        columns = [torch.cat(part).tolist() for part in zip(*found, strict=True)]
        for source, *rows in zip(*columns, strict=True):
            for ids, scores, rank, length, complete in zip(*rows, strict=True):
                if rank > -torch.inf:
                    kept = Hypothesis(tuple(ids[-length:]), tuple(scores[-length:]), rank, complete)
                    results[source].append(kept)
        return results


def _closed_up(going: Tensor) -> Tensor:
    """The sources that go on, each in its place but for the last ones, which fill the places of those that do not."""
    left = int(going.sum())
    rows = torch.arange(left, device=going.device)
    rows[(~going[:left]).nonzero().flatten()] = left + going[left:].nonzero().flatten()
    return rows


def _owned(state: State, batch: Batch) -> State:
    """The same state, of whose fixed part nothing lies where the batch does: sources that leave are written over."""
    lent = {part.untyped_storage().data_ptr() for part in tensors_of(batch)}

    def own(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in lent or not x.is_contiguous() else x

    return replace(state, fixed={name: map_tensors(own, tree) for name, tree in state.fixed.items()})
