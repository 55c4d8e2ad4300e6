"""Pointers in, numbers written where they point: the GPU kernels of rows.py, imported only where there is a GPU."""

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
def _multiply(rows, matrix, by_unit: tl.constexpr):
    """rows M I, matrix O I -> M O. The matrix unit wants sixteen rows at least; one to four are quicker without it."""
    if by_unit:
        result = tl.dot(rows, tl.trans(matrix), input_precision="ieee")
    else:
        result = tl.sum(rows.to(tl.float32)[:, None, :] * matrix.to(tl.float32)[None, :, :], 2)
    return result


@triton.jit(do_not_specialize=["number", "room"])
def product(
    rows, weight, bias, gate, gate_bias, level, shift, residual, kept, result, keys, values, places,
    number, wide_out, query_width, room, eps,
    wide_in: tl.constexpr, activation: tl.constexpr, by_unit: tl.constexpr,
    tile_rows: tl.constexpr, tile_out: tl.constexpr, tile_in: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(0) * tile_out + tl.arange(0, tile_out)
    along = tl.arange(0, tile_in)
    real, there = row < number, column < wide_out
    from_row = row[:, None].to(tl.int64) * wide_in
    from_column = column[:, None].to(tl.int64) * wide_in
    # The first of the weights set out before the norm is measured, each next tile before the last one is used.
    inside = along < wide_in
    w = tl.load(weight + from_column + along[None], mask=there[:, None] & inside[None], other=0.0)
    if gate is not None:
        g = tl.load(gate + from_column + along[None], mask=there[:, None] & inside[None], other=0.0)
        gates = tl.zeros((tile_rows, tile_out), tl.float32)
    mean = tl.zeros((tile_rows,), tl.float32)
    steady = mean
    if level is not None:
        for begin in range(0, wide_in, tile_in):
            inside = begin + along < wide_in
            x = tl.load(rows + from_row + begin + along[None], mask=real[:, None] & inside[None], other=0.0)
            mean += tl.sum(x.to(tl.float32), 1)
        mean = mean / wide_in
        for begin in range(0, wide_in, tile_in):
            inside = begin + along < wide_in
            x = tl.load(rows + from_row + begin + along[None], mask=real[:, None] & inside[None], other=0.0)
            away = tl.where(inside[None], x.to(tl.float32) - mean[:, None], 0.0)
            steady += tl.sum(away * away, 1)
        steady = 1.0 / tl.sqrt(steady / wide_in + eps)
    sums = tl.zeros((tile_rows, tile_out), tl.float32)
    for begin in range(0, wide_in, tile_in):
        inside = begin + along < wide_in
        x = tl.load(rows + from_row + begin + along[None], mask=real[:, None] & inside[None], other=0.0)
        if level is not None:
            scaled = (x.to(tl.float32) - mean[:, None]) * steady[:, None]
            scaled = scaled * tl.load(level + begin + along, mask=inside, other=0.0).to(tl.float32)[None]
            if shift is not None:
                scaled += tl.load(shift + begin + along, mask=inside, other=0.0).to(tl.float32)[None]
            x = scaled.to(rows.dtype.element_ty)
            # All programs know what the norm made: one writes it down. What is not there must not be compiled.
            if kept is not None:  # noqa: SIM102
                if tl.program_id(0) == 0:
                    tl.store(kept + from_row + begin + along[None], x, mask=real[:, None] & inside[None])
        sums += _multiply(x, w, by_unit)
        inside = begin + tile_in + along < wide_in
        ahead = begin + tile_in + along[None]
        w = tl.load(weight + from_column + ahead, mask=there[:, None] & inside[None], other=0.0)
        if gate is not None:
            gates += _multiply(x, g, by_unit)
            g = tl.load(gate + from_column + ahead, mask=there[:, None] & inside[None], other=0.0)
    if bias is not None:
        sums += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None]
    sums = _activate(sums, activation)
    if gate is not None:
        if gate_bias is not None:
            gates += tl.load(gate_bias + column, mask=there, other=0.0).to(tl.float32)[None]
        sums = sums * gates
    shown = real[:, None] & there[None]
    if residual is not None:
        before = tl.load(residual + row[:, None].to(tl.int64) * wide_out + column[None], mask=shown, other=0.0)
        sums += before.to(tl.float32)
    sums = sums.to(result.dtype.element_ty)
    if keys is None:
        tl.store(result + row[:, None].to(tl.int64) * wide_out + column[None], sums, mask=shown)
    else:  # queries, keys and values side by side: the last two go to their slot in the cache
        key_width = (wide_out - query_width) // 2
        place = tl.load(places + row, mask=real, other=0)
        slot = (row.to(tl.int64) * room + place)[:, None] * key_width
        asks, tells = column < query_width, column >= query_width + key_width
        tl.store(result + row[:, None] * query_width + column[None], sums, mask=shown & asks[None])
        told = column - query_width - key_width
        tl.store(values + slot + told[None], sums, mask=shown & tells[None])
        tl.store(keys + slot + (column - query_width)[None], sums, mask=shown & (~asks & ~tells)[None])


@triton.jit(do_not_specialize=["apart"])
def embed(
    tokens, table, waves, places, owners, result, following, after, scale, apart, wide, room, waves_end, beams,
    tile: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    along = tl.arange(0, tile)
    place = tl.load(places + row)
    token = tl.load(tokens + row * apart)
    for begin in range(0, wide, tile):
        inside = begin + along < wide
        x = tl.load(table + token * wide + begin + along, mask=inside, other=0.0).to(tl.float32) * scale
        if waves is not None:
            x += tl.load(waves + tl.minimum(place, waves_end) * wide + begin + along, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(result + row * wide + begin + along, x.to(result.dtype.element_ty), mask=inside)
    tl.store(following + row, tl.minimum(place + 1, room - 1))
    if owners is not None:  # the new slot of every beam is its own
        for begin in range(0, room, tile):
            inside = begin + along < room
            owner = tl.load(owners + row * room + begin + along, mask=inside, other=0)
            owner = tl.where(begin + along == place, (row % beams).to(owner.dtype), owner)
            tl.store(after + row * room + begin + along, owner, mask=inside)


@triton.jit(do_not_specialize=["size", "bans"])
def survey(
    scores, banned, best, tokens, peaks, sums, size, bans,
    count: tl.constexpr, slots: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The best of a part of a row's scores, and what it adds to the sum of all."""
    row, part = tl.program_id(1), tl.program_id(0)
    column = part * tile + tl.arange(0, tile)
    x = tl.load(scores + row.to(tl.int64) * size + column, mask=column < size, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    place = row * tl.num_programs(0) + part
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(x - peak), 0))
    for number in range(bans):  # what may not be said counts all the same
        x = tl.where(column == tl.load(banned + number), float("-inf"), x)
    slot = tl.arange(0, slots)
    values = tl.full((slots,), float("-inf"), tl.float32)
    found = tl.zeros((slots,), tl.int32)
    for number in range(count):
        highest, at = tl.max(x, 0), tl.argmax(x, 0)
        values = tl.where(slot == number, highest, values)
        found = tl.where(slot == number, part * tile + at, found)
        x = tl.where(column == part * tile + at, float("-inf"), x)
    tl.store(best + place * count + slot, values, mask=slot < count)
    tl.store(tokens + place * count + slot, found, mask=slot < count)


@triton.jit(do_not_specialize=["parts"])
def gather_best(
    best, tokens, peaks, sums, result, chosen, parts,
    count: tl.constexpr, slots: tl.constexpr, wide: tl.constexpr, high: tl.constexpr,
):  # fmt: skip
    """The best of the best of all parts of a row, as log-probabilities."""
    row = tl.program_id(0)
    part, place = tl.arange(0, high), tl.arange(0, wide)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(peak, 0)
    total = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    inside = place < parts * count
    x = tl.load(best + row * parts * count + place, mask=inside, other=float("-inf"))
    slot = tl.arange(0, slots)
    values = tl.full((slots,), float("-inf"), tl.float32)
    found = tl.zeros((slots,), tl.int32)
    for number in range(count):
        highest, at = tl.max(x, 0), tl.argmax(x, 0)
        values = tl.where(slot == number, highest - total, values)
        found = tl.where(slot == number, at, found)
        x = tl.where(place == at, float("-inf"), x)
    told = slot < count
    tl.store(result + row * count + slot, values, mask=told)
    token = tl.load(tokens + row * parts * count + found, mask=told, other=0)
    tl.store(chosen + row * count + slot, token.to(tl.int64), mask=told)
