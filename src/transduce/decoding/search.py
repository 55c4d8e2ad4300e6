"""A model and a batch of sources in, the best hypotheses of each source out: the only token loop.

Where a step is recorded, every tensor of the search keeps its shape and nothing waits for the host, so a step is one
function of fixed buffers: it runs as it is, or replayed as a graph (see graphs.py). On a CPU histories grow. They are
padded on the left: the newest token is always the last column. Sources that are done leave their places, or others
that wait come into them (see refilling.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from transduce.attention.positions import places as places_of
from transduce.contracts import LogitsProcessor, Strategy, TopKRequest
from transduce.decoding.beam_update import NEVER, choose, pick
from transduce.decoding.search_state import (
    Given,
    Live,
    Paths,
    UnlikeError,
    bare_search,
    draw,
    filled,
    first_scores,
    round_shape,
)
from transduce.flow import BOS, Batch, Hypothesis, Padded, State, map_tensors
from transduce.kernels.cuda_graph import Graphs, Recording, tensors_of
from transduce.kernels.native.top_k import MAX_K
from transduce.model import Transducer

ROOM = 32  # tokens that a search asks room for at first; it doubles


class Moves:
    """A model, and how the next tokens are chosen."""

    def __init__(
        self,
        model: Transducer,
        strategy: Strategy,
        rules: Sequence[LogitsProcessor],
        *,
        most: int,  # tokens of the longest hypothesis
        best: int | None,  # hypotheses of each source that are brought back; None: N
        prefixed: bool,
        steady: bool,  # True: every tensor keeps its shape, so that a move can be recorded
    ) -> None:
        self.model, self.strategy, self.rules, self.prefixed, self.steady = model, strategy, rules, prefixed, steady
        # A recorded step needs all its room at once, and few different shapes are recorded; elsewhere room that may
        # never be used would only be read in vain.
        self.most = -(-most // ROOM) * ROOM if steady else most
        self.room = self.most if steady else min(most, ROOM - 1)  # and <s>
        self.proposing = model.proposes and 0 < strategy.wanted <= MAX_K
        self.enough = min(best or strategy.width, strategy.width) if strategy.exact else strategy.width

    @property
    def key(self) -> Hashable:
        """What tells one recording of the same model and shapes from another."""
        return self.strategy, tuple(self.rules), self.most, self.enough

    def given(self, batch: Batch, longest: Tensor, prefix: Padded | None, seeds: Sequence[int] | None) -> Given:
        """What it begins with."""
        noise = None
        if self.strategy.random:
            noise = draw(seeds or range(batch.size), self.most, self.strategy.width).to(batch.device)
        wide = self.most if self.steady or batch.device.type != "cpu" else 0
        return Given(batch, longest.to(batch.device), prefix, noise, self.most, wide)

    def begin(self, given: Given) -> Live:
        """The search after its first choice."""
        if self.proposing and given.prefix is None and (banned := _banned(self.rules, 0)) is not None:
            live = bare_search(self.model, self.strategy, given, self.room)
            first = torch.full((live.totals.numel(), 1), BOS, device=live.totals.device)
            return self._propose(live, first, banned)
        live, logits = first_scores(self.model, self.strategy, given, self.room)
        return choose(self.strategy, self.rules, live, logits, self.enough)

    def step(self, live: Live, said: int | None) -> Live:
        """The search after one more choice; `said`: how many tokens every row has said, None: not all as many."""
        tokens = live.history[..., -1].reshape(-1, 1)
        if (banned := self.banned(said)) is not None:
            return self._propose(live, tokens, banned)
        read = self.model.advance(tokens, live.state)
        return choose(self.strategy, self.rules, replace(live, state=read.state), read.logits[:, -1], self.enough)

    def idle(self, places: int, given: Given) -> Live:
        """A search with so many places for sources like these, and none in them."""
        return self.begin(given).idle(places)

    def enter(self, live: Live, asked: tuple[Given, Tensor]) -> Live:
        """The search with these sources, after their first choice, in these places of it."""
        given, places = asked
        return live.put(places, self.begin(given))

    def banned(self, said: int | None) -> tuple[int, ...] | None:
        """What may not be said after so many tokens: all that tells one step from another; None: more does."""
        if not self.proposing:
            return None
        return self._always if self.prefixed or said is None else _banned(self.rules, said)

    @cached_property
    def _always(self) -> tuple[int, ...] | None:
        """What no row may say, however many tokens it has said; None: that changes, or it is not all."""
        first = _banned(self.rules, 1)
        steady = all(_banned(self.rules, said) == first for said in range(2, self.most)) if self.rules else True
        return first if steady else None

    def enlarge(self, live: Live) -> Live:
        """The same search with twice the room."""
        more = 1 + self.room
        self.room += more
        return replace(live, state=self.model.reserve(live.state, more, self.strategy.width))

    def _propose(self, live: Live, tokens: Tensor, banned: tuple[int, ...]) -> Live:
        asked = TopKRequest(self.strategy.wanted, banned, (live.totals > -torch.inf).flatten())
        return pick(self.strategy, live, self.model.propose(tokens, live.state, asked), self.enough)


def _banned(rules: Sequence[LogitsProcessor], said: int) -> tuple[int, ...] | None:
    """What no row may say after so many tokens, where rules do no more than that."""
    banned = [rule.forbids(said) for rule in (NEVER, *rules)]
    return None if any(one is None for one in banned) else tuple(token for one in banned for token in one or ())


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
    rules: Sequence[LogitsProcessor] = (),
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
        recording = self.graphs.recording(enter, (given, places), key=key, steady=self.moves.model.capturable)
        if recording is None:
            return enter((given, places))
        recording.start(enter, (given, places))
        return live

    def start(self, given: Given) -> Live:
        """A search after its first choice, in buffers of its own where its steps are recorded."""
        moves = self.moves
        if self.graphs is not None:
            self.recording = self.graphs.recording(moves.begin, given, key=moves.key, steady=moves.model.capturable)
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
