"""Many sources in, the best hypotheses of each out, by searches whose places are filled again as sources are done.

A batch of natural lengths is half empty for most of its steps: one long answer holds all the others. Here a search has
a number of places. When enough of them are free, the next sources begin together and go on in them beside those that
are still at it. Each finds what it finds in a batch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.attention.positions import places as places_of
from transduce.contracts import LogitsProcessor, Strategy
from transduce.decoding.search import Group, Loop, Moves, search
from transduce.decoding.search_state import COLUMNS, Given, Shape, filled
from transduce.flow import Batch, Hypothesis, Padded
from transduce.kernels.cuda_graph import Graphs
from transduce.model import Transducer

# Of the places come in together: fewer would read sources in small batches, more leave places free for long. Of 256
# places on a GPU, 2,014 lines took 134 ms with an eighth, 116 with a quarter, 111 with half (greedy), and 216, 190, 190
# with a beam of 5.
SHARE = 4
NARROW = 2  # a search ends before sources so many times narrower than its first: they would read padding
SHORT = 32  # columns which are so few that it does not
LOOK = 4  # recorded steps between two looks: a place that is done stays idle until then


@dataclass(frozen=True)
class Wanted:
    """Sources that come in together, and what is asked of each."""

    batch: Batch
    longest: Tensor  # G: most tokens
    prefix: Padded | None = None  # G P: tokens that every hypothesis begins with
    seeds: Sequence[int] | None = None  # one a source, for strategies that draw


@dataclass(frozen=True)
class Plan:
    """One search over many sources."""

    places: int
    groups: list[list[int]]  # rows that come in together, in turn


def plan(lengths: Sequence[int], budget: int, most: int | None = None) -> list[Plan]:
    """Searches over sources of these lengths, the longest first, each within a budget of places times columns.

    `most`: no more places than this.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    searches: list[Plan] = []
    while order:
        widest = max(lengths[order[0]], 1)
        places = _round_down(max(min(budget // widest, most or budget), 1))
        like = len(order) if widest <= SHORT else sum(lengths[row] * NARROW >= widest for row in order)
        rows, order = order[: max(like, places)], order[max(like, places) :]
        places = min(places, len(rows))
        size = -(-places // SHARE)
        searches.append(Plan(places, [rows[first : first + size] for first in range(0, len(rows), size)]))
    return searches


def _round_down(places: int) -> int:
    """Few different numbers of places, so that a recording is used again."""
    return places - places % max(1, 2 ** (places.bit_length() - 3))


@torch.inference_mode()
def refill(
    model: Transducer,
    wanted: Sequence[Wanted],
    strategy: Strategy,
    *,
    places: int,
    rules: Sequence[LogitsProcessor] = (),
    best: int | None = None,  # hypotheses of each source that are brought back; None: N
    graphs: Graphs | None = None,  # recorded steps of this model, on devices that have them
) -> list[list[Hypothesis]]:
    """As `search` for each of these in turn, all in one search: what is found for their sources, in order.

    None has more sources than there are places; all have a prefix or none.
    """
    most = max(int(one.longest.max()) for one in wanted)
    prefixed = any(one.prefix is not None for one in wanted)
    moves = Moves(model, strategy, rules, most=most, best=best, prefixed=prefixed, steady=graphs is not None)
    device, shape = next(model.parameters()).device, _shape(wanted, moves)
    groups, count = [], 0
    for one in wanted:
        numbers = torch.arange(count, count + one.batch.size)
        groups.append(Group(numbers, partial(_given, moves, one, shape, device)))
        count += one.batch.size
    loop = Loop(moves, graphs, best, look=LOOK)
    loop.refill(groups, places)
    results = loop.hypotheses(count)
    for group, one in zip(loop.apart, wanted[len(wanted) - len(loop.apart) :], strict=True):
        prefix = None if one.prefix is None else one.prefix.to(device)
        further: dict[str, Any] = {"rules": rules, "best": best, "graphs": graphs}
        batch = one.batch.to(device)
        alone = search(model, batch, strategy, longest=one.longest, prefix=prefix, seeds=one.seeds, **further)
        for number, found in zip(group.sources.tolist(), alone, strict=True):
            results[number] = found
    return results


def _shape(wanted: Sequence[Wanted], moves: Moves) -> Shape:
    """What all are filled up to: round numbers of columns where steps are recorded."""
    end, grain = (places_of(moves.model), COLUMNS) if moves.steady else (None, 1)
    sources = [
        one.batch.source.pad_to_multiple(grain, end).values.size(1) for one in wanted if one.batch.source is not None
    ]
    prefixes = [one.prefix.pad_to_multiple(grain, end).values.size(1) for one in wanted if one.prefix is not None]
    return Shape(max(one.batch.size for one in wanted), max(sources, default=0), max(prefixes, default=0))


def _given(moves: Moves, one: Wanted, shape: Shape, device: torch.device) -> Given:
    given = moves.given(one.batch, one.longest, one.prefix, one.seeds)
    return filled(given, shape if moves.steady else replace(shape, sources=one.batch.size)).to(device)
