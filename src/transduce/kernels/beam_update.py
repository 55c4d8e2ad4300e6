"""Beam update as one GPU kernel.

Appending tokens, moving finished hypotheses out of the beam and pruning hopeless ones are about fifty small operations,
each of which costs a kernel launch on a GPU. decoding/beam_update.py has the torch reference, for every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transduce.contracts import Selection, Strategy
from transduce.decoding.strategies import Beam
from transduce.flow import EOS
from transduce.kernels.dispatch import has_triton

MAX_BEAMS = 32


@dataclass(frozen=True)
class UpdatedBeams:
    """The parts of a search that change with a step."""

    history: Tensor  # B N L
    token_scores: Tensor  # B N L
    totals: Tensor  # B N
    lengths: Tensor  # B
    steps: Tensor  # B
    finished: tuple[Tensor, ...]  # ids, token_scores, ranks, lengths, complete
    rows: Tensor  # R: the row whose decoder state each row continues


def length_power(strategy: Strategy) -> float | None:
    """p, where ranks and bounds are total / length ** p; None: the strategy has its own."""
    kind = type(strategy)
    if kind.bound_lengths is not Strategy.bound_lengths or not strategy.prefer_complete or not strategy.exact:
        return None
    if kind.rank is Strategy.rank and kind.bound is Strategy.bound:
        return 0.0
    if isinstance(strategy, Beam) and kind.rank is Beam.rank and kind.bound is Beam.bound:
        return float(strategy.length_penalty)
    return None


def supports(beams: Any, strategy: Strategy, selection: Selection) -> bool:
    """Whether the kernel applies: on a GPU, with fixed shapes, for N beams ranked by a power of their length."""
    fixed = beams.history.size(-1) == beams.max_columns and selection.parents.size(1) == strategy.width <= MAX_BEAMS
    return selection.totals.is_cuda and has_triton() and fixed and length_power(strategy) is not None


def beam_update(
    beams: Any, selection: Selection, log_probs: Tensor, strategy: Strategy, num_results: int
) -> UpdatedBeams:
    """`beams`: a decoding.search_state.BeamState; log_probs (B N) of the selected tokens; num_results: see there."""
    from transduce.kernels.triton.beam_update import beam_update as kernel

    sources, width, columns = beams.history.shape
    before = beams.finished
    lengths_in = (beams.lengths, beams.max_lengths, beams.prefix_lengths, beams.steps)
    old = (before.ids, before.token_scores, before.ranks, before.lengths, before.complete.view(torch.uint8))
    history, token_scores, *finished = (torch.empty_like(one) for one in (beams.history, beams.token_scores, *old))
    totals, lengths, steps = (torch.empty_like(one) for one in (beams.totals, beams.lengths, beams.steps))
    rows = torch.empty_like(selection.parents)
    selected = (selection.parents, selection.tokens, selection.totals, log_probs)
    kernel[(sources,)](
        *(one.contiguous() for one in (*selected, beams.history, beams.token_scores, *lengths_in, *old)),
        history, token_scores, totals, lengths, steps, *finished, rows, width, columns, num_results,
        power=length_power(strategy), eos=EOS, half=max(2, 1 << (width - 1).bit_length()), tile=64, num_warps=4,
    )  # fmt: skip
    *others, complete = finished
    done = (*others, complete.view(torch.bool))
    return UpdatedBeams(history, token_scores, totals, lengths, steps, done, rows.flatten())
