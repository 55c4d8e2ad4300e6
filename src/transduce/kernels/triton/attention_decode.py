"""Pointers in, numbers written where they point: GPU kernels, imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def few_queries(
    query, keys, values, seen, result, scale, heads, group, steps, slots,
    qb, qh, qt, kb, kg, ks, vb, vg, vs, mb, mt, ms, rb, rh, rt,
    width: tl.constexpr, block: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    source, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns, tile = tl.arange(0, most), tl.arange(0, width), tl.arange(0, block)
    real = rows < steps
    q = tl.load(query + source * qb + head * qh + rows[:, None] * qt + columns[None], mask=real[:, None], other=0.0)
    greatest = tl.full((most,), -1e30, tl.float32)
    total = tl.zeros((most,), tl.float32)
    context = tl.zeros((most, width), tl.float32)
    keys += source * kb + head // group * kg
    values += source * vb + head // group * vg
    for begin in range(0, slots, block):
        slot = begin + tile
        inside = slot < slots
        k = tl.load(keys + slot[:, None] * ks + columns[None], mask=inside[:, None], other=0.0)
        looks = tl.load(
            seen + source * mb + rows[:, None] * mt + slot[None] * ms, mask=real[:, None] & inside[None], other=0
        )
        scores = tl.where(looks != 0, tl.dot(q, tl.trans(k)) * scale, -1e30)
        highest = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.where(looks != 0, tl.exp(scores - highest[:, None]), 0.0)
        shrink = tl.exp(greatest - highest)
        v = tl.load(values + slot[:, None] * vs + columns[None], mask=inside[:, None], other=0.0)
        context = context * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        greatest = highest
    context = context / tl.maximum(total, 1e-30)[:, None]
    place = result + source * rb + head * rh + rows[:, None] * rt + columns[None]
    tl.store(place, context.to(result.dtype.element_ty), mask=real[:, None])


@triton.jit
def slot_queries(
    query, keys, values, places, owners, result, scale, reach, heads, group, beams, room,
    width: tl.constexpr, block: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    source, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns, tile = tl.arange(0, most), tl.arange(0, width), tl.arange(0, block)
    real = rows < beams
    lane = source * beams + rows
    whole, kept = heads * width, heads // group * width
    q = tl.load(query + lane[:, None] * whole + head * width + columns[None], mask=real[:, None], other=0.0)
    place = tl.load(places + lane, mask=real, other=-1).to(tl.int32)
    end = tl.max(place, 0) + 1
    greatest = tl.full((most,), -1e30, tl.float32)
    total = tl.zeros((most,), tl.float32)
    context = tl.zeros((most, width), tl.float32)
    keys += (source * beams * room).to(tl.int64) * kept + head // group * width
    values += (source * beams * room).to(tl.int64) * kept + head // group * width
    for begin in range(0, beams * end, block):  # the filled slots of one beam after the other's
        inside = begin + tile < beams * end
        beam, slot = (begin + tile) // end, (begin + tile) % end
        there = (beam * room + slot)[:, None] * kept + columns[None]
        k = tl.load(keys + there, mask=inside[:, None], other=0.0)
        v = tl.load(values + there, mask=inside[:, None], other=0.0)
        looks = inside[None] & (slot[None] <= place[:, None])
        if reach is not None:
            looks = looks & (place[:, None] - slot[None] <= reach)
        if owners is not None:
            known = real[:, None] & inside[None]
            whose = tl.load(owners + lane[:, None] * room + slot[None], mask=known, other=-1)
            looks = looks & (whose == beam[None])
        scores = tl.where(looks, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
        highest = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.where(looks, tl.exp(scores - highest[:, None]), 0.0)
        shrink = tl.exp(greatest - highest)
        context = context * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        greatest = highest
    context = context / tl.maximum(total, 1e-30)[:, None]
    spot = result + lane[:, None] * whole + head * width + columns[None]
    tl.store(spot, context.to(result.dtype.element_ty), mask=real[:, None])
