"""Triton kernel of the beam update."""

import triton
import triton.language as tl


@triton.jit
def _per_length(totals, length, power: tl.constexpr):
    """totals / length ** power"""
    if power == 1.0:
        totals = totals / length
    elif power != 0.0:
        totals = totals / tl.exp2(power * tl.log2(length))
    return totals


@triton.jit
def beam_update(
    parents, tokens, totals, log_probs, history, token_scores, lengths, max_lengths, prefix_lengths, steps,
    ids, finished_scores, ranks, finished_lengths, complete,
    new_history, new_token_scores, new_totals, new_lengths, new_steps,
    new_ids, new_finished_scores, new_ranks, new_finished_lengths, new_complete, parent_rows,
    width, columns, num_results, power: tl.constexpr, eos: tl.constexpr, half: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    # One program per source. The first half of its rows are finished hypotheses, the second half the new candidates.
    source = tl.program_id(0)
    row = tl.arange(0, 2 * half)
    fresh = row >= half
    beam = tl.where(fresh, row - half, row)
    real = beam < width
    at = source * width + beam
    now, old = real & fresh, real & (row < half)
    length = tl.load(lengths + source) + 1
    begin, last = tl.load(prefix_lengths + source), tl.load(max_lengths + source)
    parent = source * width + tl.load(parents + at, mask=now, other=0)
    token = tl.load(tokens + at, mask=now, other=0)
    total = tl.load(totals + at, mask=now, other=float("-inf"))
    alive = total > float("-inf")
    ended = alive & (token == eos)
    over = tl.where(length >= last, alive, ended)
    reached = _per_length(total, (length - begin).to(tl.float32), power)
    rank = tl.where(over, reached, tl.load(ranks + at, mask=old, other=float("-inf")))
    is_complete = tl.where(fresh, ended.to(tl.int32), tl.load(complete + at, mask=old, other=0).to(tl.int32))
    count = tl.where(fresh, length, tl.load(finished_lengths + at, mask=old, other=0))
    # Number of better hypotheses: complete ones first, then by rank, then by index.
    higher = (rank[:, None] > rank[None]) | ((rank[:, None] == rank[None]) & (row[:, None] < row[None]))
    higher = (is_complete[:, None] > is_complete[None]) | ((is_complete[:, None] == is_complete[None]) & higher)
    higher = real[:, None] & ((real[None] == 0) | higher)
    position = tl.sum(higher.to(tl.int32), 0)
    stays = real & (position < width)
    spot = source * width + position
    tl.store(new_ranks + spot, rank, mask=stays)
    tl.store(new_finished_lengths + spot, count, mask=stays)
    tl.store(new_complete + spot, is_complete.to(tl.uint8), mask=stays)
    for first in range(0, columns, tile):
        column = first + tl.arange(0, tile)
        inside = (column < columns)[None]
        newest = (column == columns - 1)[None]
        there = at[:, None] * columns + column[None]
        before = parent[:, None] * columns + column[None] + 1
        into = spot[:, None] * columns + column[None]
        moves = now[:, None] & (column < columns - 1)[None]
        tokens_here = tl.where(newest, token[:, None], tl.load(history + before, mask=moves, other=0))
        tl.store(new_history + there, tokens_here, mask=now[:, None] & inside)
        tokens_here = tl.where(fresh[:, None], tokens_here, tl.load(ids + there, mask=old[:, None] & inside, other=0))
        tl.store(new_ids + into, tokens_here, mask=stays[:, None] & inside)
        score = tl.load(log_probs + at, mask=now, other=0.0)
        score = tl.where(newest, score[:, None], tl.load(token_scores + before, mask=moves, other=0.0))
        tl.store(new_token_scores + there, score, mask=now[:, None] & inside)
        score = tl.where(fresh[:, None], score, tl.load(finished_scores + there, mask=old[:, None] & inside, other=0.0))
        tl.store(new_finished_scores + into, score, mask=stays[:, None] & inside)
    # Active rows: not finished, and able to come among the best `num_results`.
    worst = tl.max(tl.where(stays & (position == num_results - 1) & (is_complete != 0), rank, float("-inf")), 0)
    remaining = tl.where(over, float("-inf"), total)
    bound = _per_length(remaining, (last - begin).to(tl.float32), power)
    tl.store(new_totals + at, tl.where(bound <= worst, float("-inf"), remaining), mask=now)
    tl.store(parent_rows + at, parent, mask=now)
    tl.store(new_lengths + source, length)
    tl.store(new_steps + source, tl.minimum(tl.load(steps + source) + 1, columns - 1))
