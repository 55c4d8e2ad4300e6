"""Pointers in, numbers written where they point: the GPU kernel of settling.py, imported only where there is a GPU."""

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
def settle(
    parents, tokens, totals, chosen, history, scores, lengths, longest, begun, drawn,
    ids, kept, ranks, counts, complete,
    new_history, new_scores, new_totals, new_lengths, new_drawn,
    new_ids, new_kept, new_ranks, new_counts, new_complete, order,
    beams, room, enough, power: tl.constexpr, end: tl.constexpr, half: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    # A program is a source. The first half of its rows are what had finished, the other half what was chosen now.
    source = tl.program_id(0)
    row = tl.arange(0, 2 * half)
    fresh = row >= half
    beam = tl.where(fresh, row - half, row)
    real = beam < beams
    at = source * beams + beam
    now, old = real & fresh, real & (row < half)
    length = tl.load(lengths + source) + 1
    begin, last = tl.load(begun + source), tl.load(longest + source)
    parent = source * beams + tl.load(parents + at, mask=now, other=0)
    token = tl.load(tokens + at, mask=now, other=0)
    total = tl.load(totals + at, mask=now, other=float("-inf"))
    alive = total > float("-inf")
    ended = alive & (token == end)
    over = tl.where(length >= last, alive, ended)
    reached = _per_length(total, (length - begin).to(tl.float32), power)
    rank = tl.where(over, reached, tl.load(ranks + at, mask=old, other=float("-inf")))
    whole = tl.where(fresh, ended.to(tl.int32), tl.load(complete + at, mask=old, other=0).to(tl.int32))
    count = tl.where(fresh, length, tl.load(counts + at, mask=old, other=0))
    # How many are better: whole ones first, then by rank, then as they stand.
    higher = (rank[:, None] > rank[None]) | ((rank[:, None] == rank[None]) & (row[:, None] < row[None]))
    higher = (whole[:, None] > whole[None]) | ((whole[:, None] == whole[None]) & higher)
    higher = real[:, None] & ((real[None] == 0) | higher)
    position = tl.sum(higher.to(tl.int32), 0)
    stays = real & (position < beams)
    spot = source * beams + position
    tl.store(new_ranks + spot, rank, mask=stays)
    tl.store(new_counts + spot, count, mask=stays)
    tl.store(new_complete + spot, whole.to(tl.uint8), mask=stays)
    for first in range(0, room, tile):
        column = first + tl.arange(0, tile)
        inside = (column < room)[None]
        newest = (column == room - 1)[None]
        there = at[:, None] * room + column[None]
        before = parent[:, None] * room + column[None] + 1
        into = spot[:, None] * room + column[None]
        moves = now[:, None] & (column < room - 1)[None]
        said = tl.where(newest, token[:, None], tl.load(history + before, mask=moves, other=0))
        tl.store(new_history + there, said, mask=now[:, None] & inside)
        said = tl.where(fresh[:, None], said, tl.load(ids + there, mask=old[:, None] & inside, other=0))
        tl.store(new_ids + into, said, mask=stays[:, None] & inside)
        score = tl.load(chosen + at, mask=now, other=0.0)
        score = tl.where(newest, score[:, None], tl.load(scores + before, mask=moves, other=0.0))
        tl.store(new_scores + there, score, mask=now[:, None] & inside)
        score = tl.where(fresh[:, None], score, tl.load(kept + there, mask=old[:, None] & inside, other=0.0))
        tl.store(new_kept + into, score, mask=stays[:, None] & inside)
    # What goes on: neither over, nor unable to come among the best that are asked for.
    floor = tl.max(tl.where(stays & (position == enough - 1) & (whole != 0), rank, float("-inf")), 0)
    left = tl.where(over, float("-inf"), total)
    bound = _per_length(left, (last - begin).to(tl.float32), power)
    tl.store(new_totals + at, tl.where(bound <= floor, float("-inf"), left), mask=now)
    tl.store(order + at, parent, mask=now)
    tl.store(new_lengths + source, length)
    tl.store(new_drawn + source, tl.minimum(tl.load(drawn + source) + 1, room - 1))
