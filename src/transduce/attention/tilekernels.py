"""Pointers in, numbers written where they point: the GPU kernels of tiles.py, imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def weigh(query, keys, real, steps, slots, scale, causal: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr):
    """softmax(scale q k^T) over the keys that may be seen, 0 where there are none"""
    row, slot = tl.arange(0, tall), tl.arange(0, wide)
    seen = (row < steps)[:, None] & (slot < slots)[None]
    if real is not None:
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
def tile_contexts(
    query, keys, values, real, result, scale, heads, steps, slots, rb,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, cb, ch, ct,
    causal: tl.constexpr, width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    source, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q = read_tile(query + source * qb + head * qh, qt, steps, width, tall)
    k = read_tile(keys + source * kb + head * kh, ks, slots, width, wide)
    v = read_tile(values + source * vb + head * vh, vs, slots, width, wide)
    if real is not None:
        real += source * rb
    weights = weigh(q, k, real, steps, slots, scale, causal, tall, wide)
    write_tile(result + source * cb + head * ch, ct, steps, tl.dot(weights.to(v.dtype), v), width, tall)


@triton.jit
def tile_slopes(
    query, keys, values, real, slopes, to_query, to_keys, to_values, scale, heads, steps, slots, rb,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, cb, ch, ct, xb, xh, xt, yb, yh, ys, zb, zh, zs,
    causal: tl.constexpr, width: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    source, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q = read_tile(query + source * qb + head * qh, qt, steps, width, tall)
    k = read_tile(keys + source * kb + head * kh, ks, slots, width, wide)
    if real is not None:
        real += source * rb
    weights = weigh(q, k, real, steps, slots, scale, causal, tall, wide)
    slope = read_tile(slopes + source * cb + head * ch, ct, steps, width, tall)
    for_values = tl.dot(tl.trans(weights.to(slope.dtype)), slope)
    write_tile(to_values + source * zb + head * zh, zs, slots, for_values, width, wide)
    v = read_tile(values + source * vb + head * vh, vs, slots, width, wide)
    back = tl.dot(slope, tl.trans(v))
    back = (weights * (back - tl.sum(weights * back, 1)[:, None]) * scale).to(k.dtype)
    write_tile(to_query + source * xb + head * xh, xt, steps, tl.dot(back, k), width, tall)
    write_tile(to_keys + source * yb + head * yh, ys, slots, tl.dot(tl.trans(back), q), width, wide)
