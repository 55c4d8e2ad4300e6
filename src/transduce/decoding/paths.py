"""Tokens so far and what a search knows of them: the values that go from one step of it to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.flow import Batch, Padded, State

COMPLETE = 1e9  # of a whole hypothesis over one that was cut, whatever their ranks


@dataclass(frozen=True)
class Given:
    """What a search begins with."""

    batch: Batch
    longest: Tensor  # B: most tokens
    prefix: Padded | None  # B P: tokens that every hypothesis begins with
    noise: Tensor | None  # B L N
    most: int  # L: the greatest of `longest`
    wide: int  # columns of the first histories: L where shapes must stay, else 0, and they grow


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
        pairs = zip(vars(self.widened(other)).values(), vars(other).values(), strict=True)
        return Paths(*(torch.cat(pair, 1) for pair in pairs))

    def widened(self, other: Paths) -> Paths:
        """With as many columns as those that are longer by now."""
        more = other.ids.size(2) - self.ids.size(2)
        return replace(self, ids=F.pad(self.ids, (more, 0)), scores=F.pad(self.scores, (more, 0))) if more else self

    def keep(self, rows: Tensor) -> Paths:
        return Paths(*(values[rows] for values in vars(self).values()))


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

    def keep(self, rows: Tensor) -> Live:
        names = ("history", "scores", "totals", "lengths", "longest", "begun", "drawn")
        return Live(
            state=self.state.keep(rows, owned=True),
            finished=self.finished.keep(rows),
            noise=None if self.noise is None else self.noise[rows],
            most=self.most,
            **{name: getattr(self, name)[rows] for name in names},
        )

    @property
    def going(self) -> Tensor:
        """B: which sources have a row that goes on."""
        return (self.totals > -torch.inf).any(1)
