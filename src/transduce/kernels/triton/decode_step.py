"""Triton kernels of a decoding step: embedding, fused linear layers, top-k, beam update."""

import triton
import triton.language as tl


@triton.jit
def _activate(values, kind: tl.constexpr):
    if kind == "relu":
        values = tl.maximum(values, 0.0)
    elif kind == "gelu":
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif kind == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        values = values * tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    elif kind == "silu":
        values = values * tl.sigmoid(values)
    return values


@triton.jit
def _matmul(rows, matrix, use_mma: tl.constexpr):
    """rows M I, matrix O I -> M O. The matrix unit takes at least sixteen rows; up to four are faster without it."""
    if use_mma:
        result = tl.dot(rows, tl.trans(matrix), input_precision="ieee")
    else:
        result = tl.sum(rows.to(tl.float32)[:, None, :] * matrix.to(tl.float32)[None, :, :], 2)
    return result


@triton.jit(do_not_specialize=["number", "capacity"])
def fused_linear(
    rows, weight, bias, gate, gate_bias, norm_weight, norm_bias, residual, normed, result, keys, values, positions,
    number, outputs, query_width, capacity, eps,
    inputs: tl.constexpr, activation: tl.constexpr, use_mma: tl.constexpr,
    tile_rows: tl.constexpr, tile_out: tl.constexpr, tile_in: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(0) * tile_out + tl.arange(0, tile_out)
    along = tl.arange(0, tile_in)
    real, there = row < number, column < outputs
    row_offset = row[:, None].to(tl.int64) * inputs
    weight_offset = column[:, None].to(tl.int64) * inputs
    # Weights are prefetched: the first tile before the norm is computed, each next tile before the last one is used.
    inside = along < inputs
    w = tl.load(weight + weight_offset + along[None], mask=there[:, None] & inside[None], other=0.0)
    if gate is not None:
        g = tl.load(gate + weight_offset + along[None], mask=there[:, None] & inside[None], other=0.0)
        gates = tl.zeros((tile_rows, tile_out), tl.float32)
    mean = tl.zeros((tile_rows,), tl.float32)
    inverse_std = mean
    if norm_weight is not None:
        for begin in range(0, inputs, tile_in):
            inside = begin + along < inputs
            x = tl.load(rows + row_offset + begin + along[None], mask=real[:, None] & inside[None], other=0.0)
            mean += tl.sum(x.to(tl.float32), 1)
        mean = mean / inputs
        for begin in range(0, inputs, tile_in):
            inside = begin + along < inputs
            x = tl.load(rows + row_offset + begin + along[None], mask=real[:, None] & inside[None], other=0.0)
            away = tl.where(inside[None], x.to(tl.float32) - mean[:, None], 0.0)
            inverse_std += tl.sum(away * away, 1)
        inverse_std = 1.0 / tl.sqrt(inverse_std / inputs + eps)
    sums = tl.zeros((tile_rows, tile_out), tl.float32)
    for begin in range(0, inputs, tile_in):
        inside = begin + along < inputs
        x = tl.load(rows + row_offset + begin + along[None], mask=real[:, None] & inside[None], other=0.0)
        if norm_weight is not None:
            scaled = (x.to(tl.float32) - mean[:, None]) * inverse_std[:, None]
            scaled = scaled * tl.load(norm_weight + begin + along, mask=inside, other=0.0).to(tl.float32)[None]
            if norm_bias is not None:
                scaled += tl.load(norm_bias + begin + along, mask=inside, other=0.0).to(tl.float32)[None]
            x = scaled.to(rows.dtype.element_ty)
            # Every program computes the norm; the first one stores it. Nested: an absent pointer must not be compiled.
            if normed is not None:  # noqa: SIM102
                if tl.program_id(0) == 0:
                    tl.store(normed + row_offset + begin + along[None], x, mask=real[:, None] & inside[None])
        sums += _matmul(x, w, use_mma)
        inside = begin + tile_in + along < inputs
        next_tile = begin + tile_in + along[None]
        w = tl.load(weight + weight_offset + next_tile, mask=there[:, None] & inside[None], other=0.0)
        if gate is not None:
            gates += _matmul(x, g, use_mma)
            g = tl.load(gate + weight_offset + next_tile, mask=there[:, None] & inside[None], other=0.0)
    if bias is not None:
        sums += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None]
    sums = _activate(sums, activation)
    if gate is not None:
        if gate_bias is not None:
            gates += tl.load(gate_bias + column, mask=there, other=0.0).to(tl.float32)[None]
        sums = sums * gates
    valid = real[:, None] & there[None]
    if residual is not None:
        before = tl.load(residual + row[:, None].to(tl.int64) * outputs + column[None], mask=valid, other=0.0)
        sums += before.to(tl.float32)
    sums = sums.to(result.dtype.element_ty)
    if keys is None:
        tl.store(result + row[:, None].to(tl.int64) * outputs + column[None], sums, mask=valid)
    else:  # queries, keys and values: the last two go to their slot in the cache
        key_width = (outputs - query_width) // 2
        position = tl.load(positions + row, mask=real, other=0)
        slot = (row.to(tl.int64) * capacity + position)[:, None] * key_width
        is_query, is_value = column < query_width, column >= query_width + key_width
        tl.store(result + row[:, None] * query_width + column[None], sums, mask=valid & is_query[None])
        value_column = column - query_width - key_width
        tl.store(values + slot + value_column[None], sums, mask=valid & is_value[None])
        tl.store(keys + slot + (column - query_width)[None], sums, mask=valid & (~is_query & ~is_value)[None])


@triton.jit(do_not_specialize=["token_stride"])
def embed(
    tokens, table, position_table, positions, indirection, result, next_positions, updated, scale, token_stride,
    width, capacity, last_position, beams,
    tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    along = tl.arange(0, tile)
    position = tl.load(positions + row)
    token = tl.load(tokens + row * token_stride)
    for begin in range(0, width, tile):
        inside = begin + along < width
        x = tl.load(table + token * width + begin + along, mask=inside, other=0.0).to(tl.float32) * scale
        if position_table is not None:
            x += tl.load(
                position_table + tl.minimum(position, last_position) * width + begin + along, mask=inside, other=0.0
            ).to(tl.float32)
        tl.store(result + row * width + begin + along, x.to(result.dtype.element_ty), mask=inside)
    tl.store(next_positions + row, tl.minimum(position + 1, capacity - 1))
    if indirection is not None:  # the new slot of every beam is its own
        for begin in range(0, capacity, tile):
            inside = begin + along < capacity
            beam = tl.load(indirection + row * capacity + begin + along, mask=inside, other=0)
            beam = tl.where(begin + along == position, (row % beams).to(beam.dtype), beam)
            tl.store(updated + row * capacity + begin + along, beam, mask=inside)


@triton.jit(do_not_specialize=["size", "num_suppressed"])
def partial_top_k(
    scores, suppressed, best, tokens, maxima, sums, size, num_suppressed,
    count: tl.constexpr, slots: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Top-k of one tile of the logits of a row, with its maximum and sum of exponentials."""
    row, part = tl.program_id(1), tl.program_id(0)
    column = part * tile + tl.arange(0, tile)
    x = tl.load(scores + row.to(tl.int64) * size + column, mask=column < size, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    offset = row * tl.num_programs(0) + part
    tl.store(maxima + offset, maximum)
    tl.store(sums + offset, tl.sum(tl.exp(x - maximum), 0))
    for number in range(num_suppressed):  # suppressed tokens count in the softmax
        x = tl.where(column == tl.load(suppressed + number), float("-inf"), x)
    slot = tl.arange(0, slots)
    values = tl.full((slots,), float("-inf"), tl.float32)
    indices = tl.zeros((slots,), tl.int32)
    for number in range(count):
        highest, at = tl.max(x, 0), tl.argmax(x, 0)
        values = tl.where(slot == number, highest, values)
        indices = tl.where(slot == number, part * tile + at, indices)
        x = tl.where(column == part * tile + at, float("-inf"), x)
    tl.store(best + offset * count + slot, values, mask=slot < count)
    tl.store(tokens + offset * count + slot, indices, mask=slot < count)


@triton.jit(do_not_specialize=["parts"])
def merge_top_k(
    best, tokens, maxima, sums, result, chosen, parts,
    count: tl.constexpr, slots: tl.constexpr, candidates: tl.constexpr, part_tile: tl.constexpr,
):  # fmt: skip
    """Top-k of a row from those of its tiles, as log-probabilities."""
    row = tl.program_id(0)
    part, candidate = tl.arange(0, part_tile), tl.arange(0, candidates)
    maximum = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(maximum, 0)
    total = top + tl.log(tl.sum(total * tl.exp(maximum - top), 0))
    inside = candidate < parts * count
    x = tl.load(best + row * parts * count + candidate, mask=inside, other=float("-inf"))
    slot = tl.arange(0, slots)
    values = tl.full((slots,), float("-inf"), tl.float32)
    indices = tl.zeros((slots,), tl.int32)
    for number in range(count):
        highest, at = tl.max(x, 0), tl.argmax(x, 0)
        values = tl.where(slot == number, highest - total, values)
        indices = tl.where(slot == number, at, indices)
        x = tl.where(candidate == at, float("-inf"), x)
    valid = slot < count
    tl.store(result + row * count + slot, values, mask=valid)
    token = tl.load(tokens + row * parts * count + indices, mask=valid, other=0)
    tl.store(chosen + row * count + slot, token.to(tl.int64), mask=valid)


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
