"""Pointers in, numbers written where they point: GPU kernels of training, imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def mixed(number):
    """A 32-bit number whose bits all hang on all bits of the one given."""
    number ^= number >> 16
    number *= 0x7FEB352D
    number ^= number >> 15
    number *= 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def kept(place, seed, limit):
    """Which numbers dropout leaves in: a function of the seed and the place, so it need not be remembered."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    return mixed(mixed(place.to(tl.uint32) ^ low) + high) >= limit.to(tl.uint32)


@triton.jit
def joined(values, changes, seed, place, inside, limit, factor, drops: tl.constexpr):
    """values + dropout(changes), in fp32"""
    total = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    if changes is not None:
        change = tl.load(changes + place, mask=inside, other=0.0).to(tl.float32)
        if drops:
            change = tl.where(kept(place, tl.load(seed), limit), change * factor, 0.0)
        total += change
    return total


@triton.jit
def add_rows(values, changes, seed, result, size, limit, factor, drops: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    total = joined(values, changes, seed, place, inside, limit, factor, drops)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def drop_rows(changes, seed, result, size, limit, factor, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    change = tl.load(changes + place, mask=inside, other=0.0).to(tl.float32)
    change = tl.where(kept(place, tl.load(seed), limit), change * factor, 0.0)
    tl.store(result + place, change.to(result.dtype.element_ty), mask=inside)


@triton.jit
def level_rows(
    values, changes, seed, weight, bias, totals, result, means, scales, count, limit, factor, epsilon,
    width: tl.constexpr, drops: tl.constexpr, centred: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    inside = (row < count)[:, None] & (column < width)[None]
    place = row[:, None] * width + column[None]
    total = joined(values, changes, seed, place, inside, limit, factor, drops)
    if totals is not None:
        tl.store(totals + place, total.to(totals.dtype.element_ty), mask=inside)
    if centred:
        mean = tl.sum(total, 1) / width
        tl.store(means + row, mean, mask=row < count)
        total = tl.where(inside, total - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(total * total, 1) / width + epsilon)
    tl.store(scales + row, scale, mask=row < count)
    made = total * scale[:, None] * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None]
    if bias is not None:
        made += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None]
    tl.store(result + place, made.to(result.dtype.element_ty), mask=inside)


@triton.jit
def level_slopes(
    slopes, beside, values, changes, seed, weight, means, scales, to_values, to_changes, sums,
    count, limit, factor,
    width: tl.constexpr, drops: tl.constexpr, centred: tl.constexpr, sums_up: tl.constexpr, asked: tl.constexpr,
    block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """`beside` is the slope of the sum before the norm (sums_up), or a second one of what leaves the norm.

    `asked`: the columns of to_changes are summed up as well.
    """
    column = tl.arange(0, block)
    real = column < width
    gain = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None]
    for_weight = tl.zeros((block,), tl.float32)
    for_bias = tl.zeros((block,), tl.float32)
    for_changes = tl.zeros((block,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, rows), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * rows + tl.arange(0, rows)
        inside = (row < count)[:, None] & real[None]
        place = row[:, None] * width + column[None]
        total = joined(values, changes, seed, place, inside, limit, factor, drops)
        scale = tl.load(scales + row, mask=row < count, other=0.0)[:, None]
        if centred:
            total -= tl.load(means + row, mask=row < count, other=0.0)[:, None]
        level = tl.where(inside, total * scale, 0.0)
        slope = tl.load(slopes + place, mask=inside, other=0.0).to(tl.float32)
        if beside is not None:
            other = tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
            if not sums_up:
                slope += other
        for_weight += tl.sum(slope * level, 0)
        for_bias += tl.sum(slope, 0)
        slope *= gain
        back = slope - level * (tl.sum(slope * level, 1) / width)[:, None]
        if centred:
            back -= (tl.sum(slope, 1) / width)[:, None]
        back *= scale
        if beside is not None and sums_up:
            back += other
        tl.store(to_values + place, back.to(to_values.dtype.element_ty), mask=inside)
        if changes is not None:
            if drops:
                back = tl.where(kept(place, tl.load(seed), limit), back * factor, 0.0)
            tl.store(to_changes + place, back.to(to_changes.dtype.element_ty), mask=inside)
            if asked:
                for_changes += tl.sum(back, 0)
    sums += tl.program_id(0) * (3 if asked else 2) * width + column
    tl.store(sums, for_weight, mask=real)
    tl.store(sums + width, for_bias, mask=real)
    if asked:
        tl.store(sums + 2 * width, for_changes, mask=real)


@triton.jit
def steepness(before, activation: tl.constexpr):
    """The slope of an activation at what entered it; of a rectifier, at what left it."""
    if activation == "relu":
        return tl.where(before > 0, 1.0, 0.0)
    if activation == "silu":
        gate = tl.sigmoid(before)
        return gate * (1 + before * (1 - gate))
    if activation == "gelu_tanh":
        slope = 0.7978845608 * (1 + 0.134145 * before * before)
        bent = 2 * tl.sigmoid(2 * 0.7978845608 * before * (1 + 0.044715 * before * before)) - 1
        return 0.5 * (1 + bent) + 0.5 * before * (1 - bent * bent) * slope
    return 0.5 * (1 + tl.erf(before * 0.7071067812)) + before * 0.3989422804 * tl.exp(-0.5 * before * before)


@triton.jit
def sum_columns(
    values, gates, result, sums, count, size, stride,
    activation: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Sums over this program's rows; with gates, of the values times the activation's slope there, which is written."""
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    total = tl.zeros((tall, wide), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(count, tall), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * tall + tl.arange(0, tall)
        inside = (row < count)[:, None] & (column < size)[None]
        place = row[:, None] * stride + column[None]
        part = tl.load(values + place, mask=inside, other=0.0)
        part = part.to(tl.float32)
        if gates is not None:
            part *= steepness(tl.load(gates + place, mask=inside, other=0.0).to(tl.float32), activation)
            tl.store(result + place, part.to(result.dtype.element_ty), mask=inside)
        total += part
    tl.store(sums + tl.program_id(1) * size + column, tl.sum(total, 0), mask=column < size)
