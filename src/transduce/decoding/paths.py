"""Tokens so far and what a search knows of them: the values that go from one step of it to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.flow import Batch, Padded, State, Tree

ROWS = ("history", "scores", "totals", "lengths", "longest", "begun", "drawn")  # one row a source each
COMPLETE = 1e9  # of a whole hypothesis over one that was cut, whatever their ranks


class UnlikeError(Exception):
    """Sources that cannot go on beside others."""


@dataclass(frozen=True)
class Given:
    """What a search begins with."""

    batch: Batch
    longest: Tensor  # B: most tokens
    prefix: Padded | None  # B P: tokens that every hypothesis begins with
    noise: Tensor | None  # B L N
    most: int  # L: the greatest of `longest`
    wide: int  # columns of the first histories: L where shapes must stay, else 0, and they grow

    def to(self, device: torch.device) -> Given:
        """The same there."""
        prefix = None if self.prefix is None else self.prefix.to(device)
        noise = None if self.noise is None else self.noise.to(device)
        return replace(self, batch=self.batch.to(device), longest=self.longest.to(device), prefix=prefix, noise=noise)


@dataclass(frozen=True)
class Paths:
    """Rows of tokens with what the search knows of each: B N of them."""

    ids: Tensor  # B N L, padded on the left
    scores: Tensor  # B N L: the model's own log-probabilities, untouched by rules
    ranks: Tensor  # B N: -inf where there is no path
    lengths: Tensor  # B N
    complete: Tensor  # B N: ended with </s>, not cut

    def best(self, most: int, whole_first: bool) -> Paths:
        """The `most` best by their rank; whole ones before those that were cut where that is asked for."""
        ranks = self.ranks.double() + COMPLETE * self.complete if whole_first else self.ranks
        order = ranks.topk(most, 1).indices  # B N

        def pick(values: Tensor) -> Tensor:
            index = order if values.dim() == 2 else order[..., None].expand(-1, -1, values.size(2))
            return values.gather(1, index)

        return Paths(*(pick(values) for values in vars(self).values()))

    def join(self, other: Paths) -> Paths:
        pairs = zip(vars(self.widened(other.ids.size(2))).values(), vars(other).values(), strict=True)
        return Paths(*(torch.cat(pair, 1) for pair in pairs))

    def widened(self, columns: int) -> Paths:
        """With as many columns at least: others are longer by now."""
        more = columns - self.ids.size(2)
        if more <= 0:
            return self
        return replace(self, ids=F.pad(self.ids, (more, 0)), scores=F.pad(self.scores, (more, 0)))

    def put(self, places: Tensor, other: Paths) -> Paths:
        """The rows in these places written over by the first ones of others."""
        columns = max(self.ids.size(2), other.ids.size(2))
        pairs = zip(vars(self.widened(columns)).values(), vars(other.widened(columns)).values(), strict=True)
        return Paths(*(old.index_copy_(0, places, new[: len(places)]) for old, new in pairs))

    def keep(self, rows: Tensor, most: int | None = None) -> Paths:
        """Those of these sources, the first `most` of each."""
        return Paths(*(values[:, :most][rows] for values in vars(self).values()))


@dataclass(frozen=True)
class Live:
    """A search between two steps. Axis 0 is the sources that are left, axis 1 their beams."""

    state: State  # all but the newest token read
    history: Tensor  # B N L
    scores: Tensor  # B N L
    totals: Tensor  # B N: what the search adds up, -inf for a dead row
    lengths: Tensor  # B: tokens so far, a forced prefix included
    longest: Tensor  # B: most tokens
    begun: Tensor  # B: tokens that were given, which no rank counts
    drawn: Tensor  # B: steps so far
    finished: Paths
    noise: Tensor | None  # B L N
    most: int = 0  # L: columns that histories come to have; 0: they have all

    def keep(self, rows: Tensor, *, owned: bool = True) -> Live:
        """Only these sources. `owned`: nobody else reads the state, see `State.keep`."""
        return Live(
            state=self.state.keep(rows, owned=owned),
            finished=self.finished.keep(rows),
            noise=None if self.noise is None else self.noise[rows],
            most=self.most,
            **{name: getattr(self, name)[rows] for name in ROWS},
        )

    def idle(self, places: int) -> Live:
        """So many places for sources like these, in which none is searched yet: see `put`."""
        rows = torch.arange(places, device=self.totals.device) % len(self.totals)  # real numbers, nowhere a nan
        empty = self.keep(rows, owned=False)
        return replace(empty, totals=torch.full_like(empty.totals, -torch.inf))

    def put(self, places: Tensor, other: Live) -> Live:
        """The sources in these places replaced by the first ones of another search; all is written over.

        An UnlikeError where what is known of them has another form: then nothing is.
        """
        if _form(vars(self.state)) != _form(vars(other.state)):
            raise UnlikeError

        def write(old: Tensor, new: Tensor) -> Tensor:
            if new.dim() == 3:  # as wide as this search is by now
                new = F.pad(new, (old.size(2) - new.size(2), 0))
            return old.index_copy_(0, places, new[: len(places)])

        return Live(
            state=self.state.put(places, other.state, owned=True),
            finished=self.finished.put(places, other.finished),
            noise=None if self.noise is None or other.noise is None else write(self.noise, other.noise),
            most=self.most,
            **{name: write(getattr(self, name), getattr(other, name)) for name in ROWS},
        )

    @property
    def going(self) -> Tensor:
        """B: which sources have a row that goes on."""
        return (self.totals > -torch.inf).any(1)


def _form(tree: Tree) -> Any:
    """Names and shapes of tensors but for their first axis."""
    if isinstance(tree, dict):
        return {name: _form(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(_form, tree))
    return tree.shape[1:] if isinstance(tree, Tensor) else tree
