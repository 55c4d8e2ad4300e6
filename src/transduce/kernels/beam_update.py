"""A search and what was chosen now in, the search before its next step out, by one GPU kernel.

Appending tokens, setting aside what ended and giving up what is hopeless are some fifty operations on a few numbers: on
a GPU each of them costs as much as a matrix. The loop says the same by torch's operations, for every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transduce.contracts import Selection, Strategy
from transduce.decoding.strategies import Beam
from transduce.flow import EOS
from transduce.kernels.dispatch import compiles

MOST = 32  # beams


@dataclass(frozen=True)
class Settled:
    """What is new in a search after a step."""

    history: Tensor  # B N L
    scores: Tensor  # B N L
    totals: Tensor  # B N
    lengths: Tensor  # B
    drawn: Tensor  # B
    finished: tuple[Tensor, ...]  # ids, scores, ranks, lengths, complete
    rows: Tensor  # R: whose past each row goes on with


def power(strategy: Strategy) -> float | None:
    """p, where ranks and bounds are total / length ** p; None: they are the strategy's own."""
    kind = type(strategy)
    if kind.horizon is not Strategy.horizon or not strategy.whole_first or not strategy.exact:
        return None
    if kind.rank is Strategy.rank and kind.bound is Strategy.bound:
        return 0.0
    if isinstance(strategy, Beam) and kind.rank is Beam.rank and kind.bound is Beam.bound:
        return float(strategy.length_penalty)
    return None


def suits(live: Any, strategy: Strategy, choice: Selection) -> bool:
    """Whether the kernel can be used: on a GPU, where histories have all their columns, for N of a known rank."""
    steady = live.history.size(-1) == live.most and choice.parents.size(1) == strategy.width <= MOST
    return choice.totals.is_cuda and compiles() and steady and power(strategy) is not None


def settled(live: Any, choice: Selection, chosen: Tensor, strategy: Strategy, enough: int) -> Settled:
    """live: as the loop has it; chosen (B N): log-probabilities of the tokens; enough: how many are asked for."""
    from transduce.kernels.triton.beam_update import settle

    sources, beams, room = live.history.shape
    before = live.finished
    flat = (live.lengths, live.longest, live.begun, live.drawn)
    old = (before.ids, before.scores, before.ranks, before.lengths, before.complete.view(torch.uint8))
    history, scores, *done = (torch.empty_like(one) for one in (live.history, live.scores, *old))
    totals, lengths, drawn = (torch.empty_like(one) for one in (live.totals, live.lengths, live.drawn))
    rows = torch.empty_like(choice.parents)
    picked = (choice.parents, choice.tokens, choice.totals, chosen)
    settle[(sources,)](
        *(one.contiguous() for one in (*picked, live.history, live.scores, *flat, *old)),
        history, scores, totals, lengths, drawn, *done, rows, beams, room, enough,
        power=power(strategy), end=EOS, half=max(2, 1 << (beams - 1).bit_length()), tile=64, num_warps=4,
    )  # fmt: skip
    *paths, complete = done
    return Settled(history, scores, totals, lengths, drawn, (*paths, complete.view(torch.bool)), rows.flatten())
