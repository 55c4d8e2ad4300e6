"""Beam update as one GPU kernel.

Appending tokens, moving finished hypotheses out of the beam and pruning hopeless ones are about fifty small operations,
each of which costs a kernel launch on a GPU. decoding/beam_update.py has the torch reference, for every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transduce.contracts import Selection
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


def supports(beams: Any, selection: Selection, width: int) -> bool:
    """Whether the kernel applies: on a GPU, with fixed shapes, for `width` beams."""
    fixed = beams.history.size(-1) == beams.max_columns and selection.parents.size(1) == width <= MAX_BEAMS
    return selection.totals.is_cuda and has_triton() and fixed


def beam_update(beams: Any, selection: Selection, log_probs: Tensor, power: float, num_results: int) -> UpdatedBeams:
    """One step of a search whose ranks and bounds are total / length ** power.

    `beams` is a decoding.search_state.BeamState, log_probs (B N) belong to the selected tokens.
    """
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
        power=power, eos=EOS, half=max(2, 1 << (width - 1).bit_length()), tile=64, num_warps=4,
    )  # fmt: skip
    *others, complete = finished
    done = (*others, complete.view(torch.bool))
    return UpdatedBeams(history, token_scores, totals, lengths, steps, done, rows.flatten())
