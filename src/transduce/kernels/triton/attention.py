"""Triton kernels of attention: over short rows in training; over a memory or a KV cache in a decoding step."""

import triton
import triton.language as tl


@triton.jit
def attention_weights(
    query, keys, mask, queries, length, mt, scale,
    causal: tl.constexpr, by_query: tl.constexpr, query_block: tl.constexpr, key_block: tl.constexpr,
):  # fmt: skip
    """softmax(scale q k^T) over the visible keys, 0 for a query without any"""
    row, key = tl.arange(0, query_block), tl.arange(0, key_block)
    visible = (row < queries)[:, None] & (key < length)[None]
    if by_query:
        visible = visible & (tl.load(mask + row[:, None] * mt + key[None], mask=visible, other=0) != 0)
    elif mask is not None:
        visible = visible & (tl.load(mask + key, mask=key < length, other=0) != 0)[None]
    if causal:
        visible = visible & (key[None] <= row[:, None])
    scores = tl.where(visible, tl.dot(query, tl.trans(keys)) * scale, -1e30)
    weights = tl.where(visible, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
    return weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]


@triton.jit
def read_tile(base, stride, length, width: tl.constexpr, block: tl.constexpr):
    row, column = tl.arange(0, block), tl.arange(0, width)
    return tl.load(base + row[:, None] * stride + column[None], mask=(row < length)[:, None], other=0.0)


@triton.jit
def write_tile(base, stride, length, tile, width: tl.constexpr, block: tl.constexpr):
    row, column = tl.arange(0, block), tl.arange(0, width)
    pointers = base + row[:, None] * stride + column[None]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def write_column_sums(base, tile, width: tl.constexpr, block: tl.constexpr):
    """Sums of the columns, as a product with ones: sums across the threads that share a tile would take longer."""
    row, column = tl.arange(0, 16), tl.arange(0, width)  # the fewest rows of a tl.dot
    total = tl.dot(tl.full((16, block), 1.0, tile.dtype), tile)
    tl.store(base + row[:, None] * 0 + column[None], total, mask=(row == 0)[:, None])


@triton.jit
def attention_forward(
    query, keys, values, mask, result, scale, heads, queries, length, mb, mt,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, cb, ch, ct,
    causal: tl.constexpr, by_query: tl.constexpr,
    width: tl.constexpr, query_block: tl.constexpr, key_block: tl.constexpr,
):  # fmt: skip
    source, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q = read_tile(query + source * qb + head * qh, qt, queries, width, query_block)
    k = read_tile(keys + source * kb + head * kh, ks, length, width, key_block)
    v = read_tile(values + source * vb + head * vh, vs, length, width, key_block)
    if mask is not None:
        mask += source * mb
    weights = attention_weights(q, k, mask, queries, length, mt, scale, causal, by_query, query_block, key_block)
    write_tile(result + source * cb + head * ch, ct, queries, tl.dot(weights.to(v.dtype), v), width, query_block)


@triton.jit
def attention_backward(
    query, keys, values, mask, grad, query_grad, keys_grad, values_grad, sums, scale, heads, queries, length, mb, mt,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, cb, ch, ct, xb, xh, xt, yb, yh, ys, zb, zh, zs,
    causal: tl.constexpr, by_query: tl.constexpr,
    width: tl.constexpr, query_block: tl.constexpr, key_block: tl.constexpr,
):  # fmt: skip
    source, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    q = read_tile(query + source * qb + head * qh, qt, queries, width, query_block)
    k = read_tile(keys + source * kb + head * kh, ks, length, width, key_block)
    if mask is not None:
        mask += source * mb
    weights = attention_weights(q, k, mask, queries, length, mt, scale, causal, by_query, query_block, key_block)
    g = read_tile(grad + source * cb + head * ch, ct, queries, width, query_block)
    dv = tl.dot(tl.trans(weights.to(g.dtype)), g)
    write_tile(values_grad + source * zb + head * zh, zs, length, dv, width, key_block)
    v = read_tile(values + source * vb + head * vh, vs, length, width, key_block)
    ds = tl.dot(g, tl.trans(v))
    ds = (weights * (ds - tl.sum(weights * ds, 1)[:, None]) * scale).to(k.dtype)
    dq = tl.dot(ds, k)
    write_tile(query_grad + source * xb + head * xh, xt, queries, dq, width, query_block)
    write_tile(keys_grad + source * yb + head * yh, ys, length, tl.dot(tl.trans(ds), q), width, key_block)
    if sums is not None:  # bias gradients of this source: of queries, keys and values
        sums += (source * 3 * heads + head) * width
        write_column_sums(sums, dq.to(k.dtype), width, query_block)
        # A bias of the keys does not change the softmax, so its gradient is 0.
        tl.store(sums + heads * width + tl.arange(0, width), tl.zeros((width,), tl.float32))
        write_column_sums(sums + 2 * heads * width, dv.to(k.dtype), width, key_block)


@triton.jit
def decode_attention(
    query, keys, values, visible_mask, result, scale, heads, group, steps, slots,
    qb, qh, qt, kb, kg, ks, vb, vg, vs, mb, mt, ms, rb, rh, rt,
    width: tl.constexpr, block: tl.constexpr, max_queries: tl.constexpr,
):  # fmt: skip
    source, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns, tile = tl.arange(0, max_queries), tl.arange(0, width), tl.arange(0, block)
    real = rows < steps
    q = tl.load(query + source * qb + head * qh + rows[:, None] * qt + columns[None], mask=real[:, None], other=0.0)
    maximum = tl.full((max_queries,), -1e30, tl.float32)
    total = tl.zeros((max_queries,), tl.float32)
    context = tl.zeros((max_queries, width), tl.float32)
    keys += source * kb + head // group * kg
    values += source * vb + head // group * vg
    for begin in range(0, slots, block):
        slot = begin + tile
        inside = slot < slots
        k = tl.load(keys + slot[:, None] * ks + columns[None], mask=inside[:, None], other=0.0)
        visible = tl.load(
            visible_mask + source * mb + rows[:, None] * mt + slot[None] * ms,
            mask=real[:, None] & inside[None],
            other=0,
        )
        scores = tl.where(visible != 0, tl.dot(q, tl.trans(k)) * scale, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(visible != 0, tl.exp(scores - new_maximum[:, None]), 0.0)
        rescale = tl.exp(maximum - new_maximum)
        v = tl.load(values + slot[:, None] * vs + columns[None], mask=inside[:, None], other=0.0)
        context = context * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
    context = context / tl.maximum(total, 1e-30)[:, None]
    position = result + source * rb + head * rh + rows[:, None] * rt + columns[None]
    tl.store(position, context.to(result.dtype.element_ty), mask=real[:, None])


@triton.jit
def cache_attention(
    query, keys, values, positions, indirection, result, scale, window, heads, group, beams, capacity,
    width: tl.constexpr, block: tl.constexpr, max_queries: tl.constexpr,
):  # fmt: skip
    source, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns, tile = tl.arange(0, max_queries), tl.arange(0, width), tl.arange(0, block)
    real = rows < beams
    row = source * beams + rows
    row_width, key_width = heads * width, heads // group * width
    q = tl.load(query + row[:, None] * row_width + head * width + columns[None], mask=real[:, None], other=0.0)
    position = tl.load(positions + row, mask=real, other=-1).to(tl.int32)
    end = tl.max(position, 0) + 1
    maximum = tl.full((max_queries,), -1e30, tl.float32)
    total = tl.zeros((max_queries,), tl.float32)
    context = tl.zeros((max_queries, width), tl.float32)
    keys += (source * beams * capacity).to(tl.int64) * key_width + head // group * width
    values += (source * beams * capacity).to(tl.int64) * key_width + head // group * width
    for begin in range(0, beams * end, block):  # the filled slots of one beam after another
        inside = begin + tile < beams * end
        beam, slot = (begin + tile) // end, (begin + tile) % end
        there = (beam * capacity + slot)[:, None] * key_width + columns[None]
        k = tl.load(keys + there, mask=inside[:, None], other=0.0)
        v = tl.load(values + there, mask=inside[:, None], other=0.0)
        visible = inside[None] & (slot[None] <= position[:, None])
        if window is not None:
            visible = visible & (position[:, None] - slot[None] <= window)
        if indirection is not None:
            known = real[:, None] & inside[None]
            beam_of_slot = tl.load(indirection + row[:, None] * capacity + slot[None], mask=known, other=-1)
            visible = visible & (beam_of_slot == beam[None])
        scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp(scores - new_maximum[:, None]), 0.0)
        rescale = tl.exp(maximum - new_maximum)
        context = context * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
    context = context / tl.maximum(total, 1e-30)[:, None]
    output = result + row[:, None] * row_width + head * width + columns[None]
    tl.store(output, context.to(result.dtype.element_ty), mask=real[:, None])
