"""What is asked of a model in; the moves of its search out: how it begins, goes one token on, and takes others in.

A model that proposes (contracts.py) is asked for the best next tokens of each row that goes on; any other gives the
scores of all tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from transduce.contracts import Asked, Rule, Strategy
from transduce.decoding.beginning import bare_search, draw, first_scores
from transduce.decoding.choosing import NEVER, choose, pick
from transduce.decoding.paths import Given, Live
from transduce.flow import BOS, Batch, Padded
from transduce.model import Transducer
from transduce.native.choices import MOST

ROOM = 32  # tokens that a search asks room for at first; it doubles


class Moves:
    """A model, and how the next tokens are chosen."""

    def __init__(
        self,
        model: Transducer,
        strategy: Strategy,
        rules: Sequence[Rule],
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
        self.proposing = model.proposes and 0 < strategy.wanted <= MOST
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
        asked = Asked(self.strategy.wanted, banned, (live.totals > -torch.inf).flatten())
        return pick(self.strategy, live, self.model.propose(tokens, live.state, asked), self.enough)


def _banned(rules: Sequence[Rule], said: int) -> tuple[int, ...] | None:
    """What no row may say after so many tokens, where rules do no more than that."""
    banned = [rule.forbids(said) for rule in (NEVER, *rules)]
    return None if any(one is None for one in banned) else tuple(token for one in banned for token in one or ())
