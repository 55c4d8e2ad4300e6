"""Selection in a search: top-k of each row, and the beam update.

The update appends the selected tokens, moves finished hypotheses out of the beam and prunes hopeless ones: about fifty
small operations, each of which costs a kernel launch on a GPU. For the strategies whose ranks are
total / length ** power they are one Triton kernel. The torch reference serves every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.contracts import Selection, Strategy
from transduce.flow import EOS, LexicalConstraints, State, Tree
from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, native_kernels
from transduce.kernels.native.inference import MAX_K
from transduce.kernels.native.inference import top_k as native_top_k

MAX_BEAMS = 32  # of the Triton kernel
SOURCE_FIELDS = ("history", "token_scores", "totals", "lengths", "max_lengths", "prefix_lengths", "steps")
MIN_COVERAGE = 1e-6  # of a source row in the coverage penalty: sparse attention may leave a row without any weight
COMPLETE_BONUS = 1e9  # ranks a complete hypothesis above every truncated one
COMPACT_SHARE = 0.75  # on a GPU finished sources are removed once at most this share is active: removal copies the rest
TOP_K_COMPACT_SHARE = 0.5  # the same where the top-k step skips inactive rows by itself
GROUP = 128  # scores whose maximum is found first
TILE = 1024  # logits that one Triton program scans


class StateMismatchError(Exception):
    """Decoder states of different form, which cannot be searched in one batch."""


@dataclass(frozen=True)
class FinishedHypotheses:
    """Finished hypotheses of each source as tensors, B N."""

    ids: Tensor  # B N L, padded on the left
    token_scores: Tensor  # B N L: log-probabilities of the model, before any logits processor
    ranks: Tensor  # B N: -inf for an empty entry
    lengths: Tensor  # B N
    complete: Tensor  # B N: ended with </s>, not truncated

    def best(self, n: int, prefer_complete: bool) -> FinishedHypotheses:
        """The n best by rank, complete ones first if `prefer_complete`."""
        ranks = self.ranks.double() + COMPLETE_BONUS * self.complete if prefer_complete else self.ranks
        order = ranks.topk(n, 1).indices  # B N

        def pick(values: Tensor) -> Tensor:
            index = order if values.dim() == 2 else order[..., None].expand(-1, -1, values.size(2))
            return values.gather(1, index)

        return FinishedHypotheses(*(pick(values) for values in vars(self).values()))

    def join(self, other: FinishedHypotheses) -> FinishedHypotheses:
        """The hypotheses of both for each source."""
        pairs = zip(vars(self.padded(other.ids.size(2))).values(), vars(other).values(), strict=True)
        return FinishedHypotheses(*(torch.cat(pair, 1) for pair in pairs))

    def padded(self, columns: int) -> FinishedHypotheses:
        """Padded on the left to at least this number of columns."""
        more = columns - self.ids.size(2)
        if more <= 0:
            return self
        return replace(self, ids=F.pad(self.ids, (more, 0)), token_scores=F.pad(self.token_scores, (more, 0)))

    def select_sources(self, sources: Tensor, n: int | None = None) -> FinishedHypotheses:
        """Those of these sources, the first n of each."""
        return FinishedHypotheses(*(values[:, :n][sources] for values in vars(self).values()))

    def replace_sources(self, slots: Tensor, other: FinishedHypotheses) -> FinishedHypotheses:
        """The sources in these slots replaced in place by the first ones of another."""
        columns = max(self.ids.size(2), other.ids.size(2))
        pairs = zip(vars(self.padded(columns)).values(), vars(other.padded(columns)).values(), strict=True)
        return FinishedHypotheses(*(old.index_copy_(0, slots, new[: len(slots)]) for old, new in pairs))


@dataclass(frozen=True)
class BeamState:
    """A search between two steps. Axis 0 is the sources still in it, axis 1 their beams."""

    state: State  # decoder state after all tokens but the newest
    history: Tensor  # B N L: tokens so far, padded on the left
    token_scores: Tensor  # B N L
    totals: Tensor  # B N: cumulative scores, -inf for an inactive row
    lengths: Tensor  # B: tokens so far, the prefix included
    max_lengths: Tensor  # B
    prefix_lengths: Tensor  # B: forced tokens, which do not count in the length penalty
    steps: Tensor  # B: steps so far
    finished: FinishedHypotheses
    noise: Tensor | None  # B L N
    max_columns: int = 0  # L: columns that the history may grow to; 0: it has them all
    constraints: LexicalConstraints | None = None
    coverage: Tensor | None = None  # B N S: attention of all steps so far; 1 in padding. Of a coverage penalty

    def select_sources(self, sources: Tensor, *, owned: bool = True) -> BeamState:
        """Only these sources. `owned`: no other object refers to the state, see `State.select_sources`."""
        return BeamState(
            state=self.state.select_sources(sources, owned=owned),
            finished=self.finished.select_sources(sources),
            noise=None if self.noise is None else self.noise[sources],
            max_columns=self.max_columns,
            constraints=None if self.constraints is None else self.constraints.select(sources),
            coverage=None if self.coverage is None else self.coverage[sources],
            **{name: getattr(self, name)[sources] for name in SOURCE_FIELDS},
        )

    def empty_slots(self, slots: int) -> BeamState:
        """A search with this number of slots for sources of the same form, all free: see `replace_sources`."""
        sources = torch.arange(slots, device=self.totals.device) % len(self.totals)  # real numbers: no NaN anywhere
        empty = self.select_sources(sources, owned=False)
        return replace(empty, totals=torch.full_like(empty.totals, -torch.inf))

    def replace_sources(self, slots: Tensor, other: BeamState) -> BeamState:
        """The sources in these slots replaced in place by the first ones of another search.

        Raises StateMismatchError, before anything is written, if the decoder states differ in form.
        """
        if _form(vars(self.state)) != _form(vars(other.state)):
            raise StateMismatchError

        def write(old: Tensor, new: Tensor) -> Tensor:
            if new.dim() == 3:  # to the present width of the histories
                new = F.pad(new, (old.size(2) - new.size(2), 0))
            return old.index_copy_(0, slots, new[: len(slots)])

        return BeamState(
            state=self.state.replace_sources(slots, other.state, owned=True),
            finished=self.finished.replace_sources(slots, other.finished),
            noise=None if self.noise is None or other.noise is None else write(self.noise, other.noise),
            max_columns=self.max_columns,
            constraints=None,  # sources with constraints do not enter a search that has begun
            coverage=None if self.coverage is None or other.coverage is None else write(self.coverage, other.coverage),
            **{name: write(getattr(self, name), getattr(other, name)) for name in SOURCE_FIELDS},
        )

    @property
    def active(self) -> Tensor:
        """B: which sources have an active row."""
        return (self.totals > -torch.inf).any(1)


def histories_grow(device: torch.device) -> bool:
    """Whether histories are as long as the outputs so far, on a CPU; elsewhere they have all columns from the start."""
    return device.type == "cpu"


def compaction_threshold(beams: BeamState, *, top_k: bool) -> float:
    """The number of active sources up to which finished ones are removed, as removal then costs less than they do.

    On a CPU an inactive row costs as much as an active one, and compaction copies only the rows that move. The top-k
    step skips inactive rows by itself.
    """
    size = len(beams.totals)
    if beams.totals.is_cpu and not top_k:
        return size - 1
    return (TOP_K_COMPACT_SHARE if top_k else COMPACT_SHARE) * size


def _form(tree: Tree) -> Any:
    """Names, and shapes of tensors without their first axis."""
    if isinstance(tree, dict):
        return {name: _form(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(_form, tree))
    return tree.shape[1:] if isinstance(tree, Tensor) else tree


def beam_update_reference(
    strategy: Strategy, beams: BeamState, selection: Selection, log_probs: Tensor, num_results: int, power: float | None
) -> BeamState:
    """The beams before the next step, given the selected tokens with their log-probabilities (B N).

    `num_results`: finished hypotheses of each source that the search has to return.
    `power`: the ranks and bounds of the strategy are total / length ** power; None: it has its own.
    """
    beams, rows = _append(beams, selection, log_probs)
    beams = _move_finished(beams, strategy)
    if rows is not None and beams.totals.size(1) > strategy.width:
        beams, rows = _keep_best(beams, rows, strategy.width)
    beams = _prune_hopeless(beams, strategy, num_results)
    return beams if rows is None else replace(beams, state=beams.state.reorder(rows))


def _append(beams: BeamState, selection: Selection, log_probs: Tensor) -> tuple[BeamState, Tensor | None]:
    """Appends the selected tokens; the row order for the decoder state, None where it does not change."""
    sources, width = selection.parents.shape
    history, token_scores, coverage, rows = beams.history, beams.token_scores, beams.coverage, None
    if width > 1:
        offsets = torch.arange(sources, device=selection.parents.device)[:, None] * beams.totals.size(1)
        rows = (selection.parents + offsets).flatten()  # R
        history, token_scores, coverage = (_gather(one, selection.parents) for one in (history, token_scores, coverage))
    columns = max(beams.max_columns, history.size(-1))
    kept = slice(1 if history.size(-1) == columns else 0, None)
    extended = replace(
        beams,
        history=torch.cat((history[..., kept], selection.tokens[..., None]), -1),
        token_scores=torch.cat((token_scores[..., kept], log_probs[..., None]), -1),
        totals=selection.totals,
        coverage=coverage,
        lengths=beams.lengths + 1,
        steps=(beams.steps + 1).clamp(max=columns - 1),  # a replayed graph may step on after the end of a search
    )
    return extended, rows


def _gather(values: Tensor | None, rows: Tensor) -> Any:
    """The rows (B N) of each source: B N X -> B N X."""
    return None if values is None else values.gather(1, rows[..., None].expand(-1, -1, values.size(-1)))


def _keep_best(beams: BeamState, rows: Tensor, width: int) -> tuple[BeamState, Tensor]:
    """The N best unfinished candidates, where a strategy selected more."""
    order = beams.totals.topk(width, 1).indices  # B N
    kept = replace(
        beams,
        history=_gather(beams.history, order),
        token_scores=_gather(beams.token_scores, order),
        coverage=_gather(beams.coverage, order),
        totals=beams.totals.gather(1, order),
    )
    return kept, rows.view(beams.totals.shape).gather(1, order).flatten()


def _move_finished(beams: BeamState, strategy: Strategy) -> BeamState:
    """Moves rows that ended with </s> or reached the maximal length to the finished hypotheses."""
    alive = beams.totals > -torch.inf
    ended = alive & (beams.history[..., -1] == EOS)
    over = ended | (alive & (beams.lengths >= beams.max_lengths)[:, None])
    if over.is_cpu and not over.any():  # on a GPU the test would wait for the device
        return beams
    lengths = beams.lengths[:, None].expand_as(over)
    ranks = strategy.rank(beams.totals, lengths - beams.prefix_lengths[:, None])
    if beams.coverage is not None:
        ranks = ranks + strategy.coverage_penalty * beams.coverage.clamp(MIN_COVERAGE, 1.0).log().sum(-1)
    ranks = ranks.masked_fill(~over, -torch.inf)
    candidates = FinishedHypotheses(beams.history, beams.token_scores, ranks, lengths, ended)
    finished = beams.finished.join(candidates).best(strategy.width, strategy.prefer_complete)
    return replace(beams, finished=finished, totals=beams.totals.masked_fill(over, -torch.inf))


def _prune_hopeless(beams: BeamState, strategy: Strategy, num_results: int) -> BeamState:
    """Drops rows that cannot come among the best `num_results`; a source is done when it has no row left.

    With a bound that is never too low this does not change the results: a row that takes the place of a dropped one
    has a lower total still.
    """
    finished = beams.finished
    if finished.complete.is_cpu and not (finished.complete.sum(1) >= num_results).any():
        return beams
    ranks = finished.ranks.masked_fill(~finished.complete, -torch.inf)
    worst = ranks.topk(num_results, 1).values[:, -1:]  # B 1: the rank that a new hypothesis must exceed
    lengths = strategy.bound_lengths(beams.lengths - beams.prefix_lengths, beams.max_lengths - beams.prefix_lengths)
    hopeless = strategy.bound(beams.totals, lengths) <= worst  # B N
    if not strategy.exact:
        hopeless = hopeless.all(1, keepdim=True)
    return replace(beams, totals=beams.totals.masked_fill(hopeless, -torch.inf))


def _accepts_triton_update(
    strategy: Strategy, beams: BeamState, selection: Selection, log_probs: Tensor, num_results: int, power: float | None
) -> bool:
    """On a GPU, with fixed shapes."""
    if power is None or not dispatch.runs_triton(selection.totals):
        return False
    return beams.history.size(-1) == beams.max_columns and selection.parents.size(1) == strategy.width <= MAX_BEAMS


def triton_beam_update(
    strategy: Strategy, beams: BeamState, selection: Selection, log_probs: Tensor, num_results: int, power: float | None
) -> BeamState:
    from transduce.kernels.triton.decode_step import beam_update as kernel

    sources, width, columns = beams.history.shape
    before = beams.finished
    lengths_in = (beams.lengths, beams.max_lengths, beams.prefix_lengths, beams.steps)
    old = (before.ids, before.token_scores, before.ranks, before.lengths, before.complete.view(torch.uint8))
    history, token_scores, *finished = (torch.empty_like(one) for one in (beams.history, beams.token_scores, *old))
    totals, lengths, steps = (torch.empty_like(one) for one in (beams.totals, beams.lengths, beams.steps))
    rows = torch.empty_like(selection.parents)  # the row whose decoder state each row continues
    selected = (selection.parents, selection.tokens, selection.totals, log_probs)
    kernel[(sources,)](
        *(one.contiguous() for one in (*selected, beams.history, beams.token_scores, *lengths_in, *old)),
        history, token_scores, totals, lengths, steps, *finished, rows, width, columns, num_results,
        power=power, eos=EOS, half=max(2, 1 << (width - 1).bit_length()), tile=64, num_warps=4,
    )  # fmt: skip
    finished[-1] = finished[-1].view(torch.bool)
    return replace(
        beams,
        state=beams.state if width == 1 else beams.state.reorder(rows.flatten()),
        history=history,
        token_scores=token_scores,
        totals=totals,
        lengths=lengths,
        steps=steps,
        finished=FinishedHypotheses(*finished),
    )


BEAM_UPDATE = Operation(
    "beam_update", beam_update_reference, (Backend("triton", _accepts_triton_update, triton_beam_update),)
)


def top_k_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the k best of the last axis: ... V -> ... M. Which of equal scores comes first is open."""
    best = scores.topk(k)
    return best.values, best.indices


def _accepts_native(scores: Tensor, k: int) -> bool:
    plain = scores.dtype == torch.float32 and scores.is_contiguous() and native_kernels(scores) is not None
    return plain and 0 < k <= min(MAX_K, scores.size(-1))


def _accepts_grouped(scores: Tensor, k: int) -> bool:
    return scores.size(-1) // GROUP > 4 * k


def grouped_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The groups with the best maxima first: only they can hold one of the best scores. The axis is read once."""
    size = scores.size(-1)
    groups = size // GROUP
    head = scores[..., : groups * GROUP].unflatten(-1, (groups, GROUP))
    chosen = head.amax(-1).topk(k).indices  # ... M
    found = head.gather(-2, chosen[..., None].expand(*chosen.shape, GROUP))  # ... M GROUP
    indices = chosen[..., None] * GROUP + torch.arange(GROUP, device=scores.device)
    rest = torch.arange(groups * GROUP, size, device=scores.device).expand(*scores.shape[:-1], -1)
    values = torch.cat((found.flatten(-2), scores[..., groups * GROUP :]), -1)
    best, index = values.topk(k)
    return best, torch.cat((indices.flatten(-2), rest), -1).gather(-1, index)


TOP_K = Operation(
    "top_k",
    top_k_reference,
    (
        Backend("native", _accepts_native, native_top_k),
        Backend("grouped", _accepts_grouped, grouped_top_k),
    ),
)


def top_k_tokens_reference(logits: Tensor, k: int, suppressed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens (R M) of the k best logits (R V) not suppressed; -inf where there are fewer."""
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float))
    ids = torch.tensor(suppressed, dtype=torch.long, device=logits.device)
    best = log_probs.index_fill(1, ids, -torch.inf).topk(min(k, log_probs.size(1)))
    missing = (0, k - best.values.size(1))
    return F.pad(best.values, missing, value=-torch.inf), F.pad(best.indices, missing)


def _accepts_triton_top_k(logits: Tensor, k: int, suppressed: tuple[int, ...]) -> bool:
    return dispatch.fused_decoding(logits)


def triton_top_k_tokens(logits: Tensor, k: int, suppressed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """By two kernels: the best of each tile, then the best of those."""
    from transduce.kernels.triton.decode_step import merge_top_k, partial_top_k

    rows, size = logits.shape
    parts, slots = -(-size // TILE), _power_of_two(k, 2)
    maxima, sums = logits.new_empty(2, rows, parts, dtype=torch.float)
    values = logits.new_empty(rows, parts, k, dtype=torch.float)
    ids = logits.new_empty(rows, parts, k, dtype=torch.int32)
    partial_top_k[(parts, rows)](
        logits, _on_device(suppressed, logits.device), values, ids, maxima, sums, size, len(suppressed),
        count=k, slots=slots, tile=TILE,
    )  # fmt: skip
    log_probs = logits.new_empty(rows, k, dtype=torch.float)
    tokens = logits.new_empty(rows, k, dtype=torch.long)
    merge_top_k[(rows,)](
        values, ids, maxima, sums, log_probs, tokens, parts,
        count=k, slots=slots, candidates=_power_of_two(parts * k, 16), part_tile=_power_of_two(parts, 16),
    )  # fmt: skip
    return log_probs, tokens


@cache  # for good: captured steps, which cannot copy from the host, read these addresses
def _on_device(suppressed: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(suppressed or (-1,), device=device)


def _power_of_two(size: int, least: int) -> int:
    """The smallest power of two not below the size, nor below `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


TOP_K_TOKENS = Operation(
    "top_k_tokens", top_k_tokens_reference, (Backend("triton", _accepts_triton_top_k, triton_top_k_tokens),)
)
