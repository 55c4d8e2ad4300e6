"""Pointers in, numbers written where they point: the GPU kernels of tiles.py, imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def weigh(
    query, keys, real, steps, slots, rt, scale,
    causal: tl.constexpr, by_step: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """softmax(scale q k^T) over the keys that may be seen, 0 where there are none"""
    row, slot = tl.arange(0, tall), tl.arange(0, wide)
    seen = (row < steps)[:, None] & (slot < slots)[None]
    if by_step:
        seen = seen & (tl.load(real + row[:, None] * rt + slot[None], mask=seen, other=0) != 0)
    elif real is not None:
        seen = seen & (tl.load(real + slot, mask=slot < slots, other=0) != 0)[None]
    if causal:
        seen = seen & (slot[None] <= row[:, None])
    scores = tl.where(seen, tl.dot(query, tl.trans(keys)) * scale, -1e30)
    weights = tl.where(seen, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
    return weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]


@triton.jit
def read_tile(base, stride, length, width: tl.constexpr, tall: tl.constexpr):
    row, column = tl.arange(0, tall), tl.arange(0, width)
    return tl.load(base + row[:, None] * stride + column[None], mask=(row < length)[:, None], other=0.0)


@triton.jit
def write_tile(base, stride, length, tile, width: tl.constexpr, tall: tl.constexpr):
    row, column = tl.arange(0, tall), tl.arange(0, width)
    place = base + row[:, None] * stride + column[None]
    tl.store(place, tile.to(base.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def write_sums(base, tile, width: tl.constexpr, tall: tl.constexpr):
    """Of the columns. As a product with ones: sums across the threads that share a tile would take longer."""
    row, column = tl.arange(0, 16), tl.arange(0, width)  # no product has fewer rows
    total = tl.dot(tl.full((16, tall), 1.0, tile.dtype), tile)
    tl.store(base + row[:, None] * 0 + column[None], total, mask=(row == 0)[:, None])


@triton.jit
def tile_contexts(
    query, keys, values, real, result, scale, heads, steps, slots, rb, rt,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, cb, ch, ct,
    causal: tl.constexpr, by_step: tl.constexpr, width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    source, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q = read_tile(query + source * qb + head * qh, qt, steps, width, tall)
    k = read_tile(keys + source * kb + head * kh, ks, slots, width, wide)
    v = read_tile(values + source * vb + head * vh, vs, slots, width, wide)
    if real is not None:
        real += source * rb
    weights = weigh(q, k, real, steps, slots, rt, scale, causal, by_step, tall, wide)
    write_tile(result + source * cb + head * ch, ct, steps, tl.dot(weights.to(v.dtype), v), width, tall)


@triton.jit
def tile_slopes(
    query, keys, values, real, slopes, to_query, to_keys, to_values, sums, scale, heads, steps, slots, rb, rt,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, cb, ch, ct, xb, xh, xt, yb, yh, ys, zb, zh, zs,
    causal: tl.constexpr, by_step: tl.constexpr, width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    source, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q = read_tile(query + source * qb + head * qh, qt, steps, width, tall)
    k = read_tile(keys + source * kb + head * kh, ks, slots, width, wide)
    if real is not None:
        real += source * rb
    weights = weigh(q, k, real, steps, slots, rt, scale, causal, by_step, tall, wide)
    slope = read_tile(slopes + source * cb + head * ch, ct, steps, width, tall)
    for_values = tl.dot(tl.trans(weights.to(slope.dtype)), slope)
    write_tile(to_values + source * zb + head * zh, zs, slots, for_values, width, wide)
    v = read_tile(values + source * vb + head * vh, vs, slots, width, wide)
    back = tl.dot(slope, tl.trans(v))
    back = (weights * (back - tl.sum(weights * back, 1)[:, None]) * scale).to(k.dtype)
    for_query = tl.dot(back, k)
    write_tile(to_query + source * xb + head * xh, xt, steps, for_query, width, tall)
    write_tile(to_keys + source * yb + head * yh, ys, slots, tl.dot(tl.trans(back), q), width, wide)
    if sums is not None:  # of this source: queries, keys and values side by side
        sums += (source * 3 * heads + head) * width
        write_sums(sums, for_query.to(k.dtype), width, tall)
        # What is added to all keys alike leaves the weights as they are: the slopes of a row's scores have the sum 0.
        tl.store(sums + heads * width + tl.arange(0, width), tl.zeros((width,), tl.float32))
        write_sums(sums + 2 * heads * width, for_values.to(k.dtype), width, wide)
