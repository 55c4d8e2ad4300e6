"""Triton kernels of attention in a decoding step: over a memory, and over KV caches shared by beams."""

import triton
import triton.language as tl


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
