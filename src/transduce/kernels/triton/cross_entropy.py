"""Pointers in, numbers written where they point: the GPU kernels of smoothed.py, imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def read_rows(scores, gold, sums, plain, smooth, stride, size, tall: tl.constexpr, wide: tl.constexpr):
    """A row of scores is read in tiles; each column of a tile keeps its own greatest, so no thread asks another."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, tall)[:, None] * wide + tl.arange(0, wide)[None]
    greatest = tl.full((wide,), -1e30, tl.float32)
    total = tl.zeros((wide,), tl.float32)
    added = tl.zeros((wide,), tl.float32)
    scores += row * stride
    whole = size // (tall * wide) * (tall * wide)
    for begin in range(0, whole, tall * wide):  # without a mask: 16 bytes at a time
        part = tl.load(scores + begin + tile).to(tl.float32)
        highest = tl.maximum(greatest, tl.max(part, 0))
        total = total * tl.exp(greatest - highest) + tl.sum(tl.exp(part - highest[None]), 0)
        added += tl.sum(part, 0)
        greatest = highest
    inside = whole + tile < size
    part = tl.load(scores + whole + tile, mask=inside, other=-1e30).to(tl.float32)
    highest = tl.maximum(greatest, tl.max(part, 0))
    total = total * tl.exp(greatest - highest) + tl.sum(tl.where(inside, tl.exp(part - highest[None]), 0.0), 0)
    added += tl.sum(tl.where(inside, part, 0.0), 0)
    peak = tl.max(highest, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(highest - peak), 0))
    right = tl.maximum(tl.load(gold + row), 0)
    tl.store(sums + row, lse)
    tl.store(plain + row, lse - tl.load(scores + right).to(tl.float32))
    tl.store(smooth + row, lse - tl.sum(added, 0) / size)


@triton.jit
def slope_of(part, lse, gold, size, smoothing):
    """d loss / d x, where `gold` says which x are the right ones"""
    return tl.exp(part - lse) - smoothing / size - tl.where(gold, 1.0 - smoothing, 0.0)


@triton.jit
def write_rows(scores, gold, sums, factor, result, stride, result_stride, size, smoothing, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, block)
    right = tl.load(gold + row)
    lse = tl.load(sums + row)
    weight = tl.where(right >= 0, tl.load(factor).to(tl.float32), 0.0)
    scores += row * stride
    result += row * result_stride
    for begin in range(0, size // block * block, block):
        place = begin + tile
        part = tl.load(scores + place).to(tl.float32)
        slope = slope_of(part, lse, place == right, size, smoothing)
        tl.store(result + place, (slope * weight).to(result.dtype.element_ty))
    place = size // block * block + tile
    inside = place < size
    part = tl.load(scores + place, mask=inside, other=-1e30).to(tl.float32)
    slope = slope_of(part, lse, place == right, size, smoothing)
    tl.store(result + place, (slope * weight).to(result.dtype.element_ty), mask=inside)


@triton.jit
def write_tiles(
    scores, gold, sums, factor, result, totals, count, size, smoothing, tall: tl.constexpr, wide: tl.constexpr
):
    """The same in tiles, of rows that lie close together; and the sums of the columns over this program's rows."""
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    weight = tl.load(factor).to(tl.float32)
    total = tl.zeros((tall, wide), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(count, tall), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * tall + tl.arange(0, tall)
        inside = (row < count)[:, None] & (column < size)[None]
        place = row[:, None] * size + column[None]
        right = tl.load(gold + row, mask=row < count, other=-1)[:, None]
        lse = tl.load(sums + row, mask=row < count, other=0.0)[:, None]
        part = tl.load(scores + place, mask=inside, other=-1e30).to(tl.float32)
        slope = slope_of(part, lse, column[None] == right, size, smoothing) * tl.where(right >= 0, weight, 0.0)
        tl.store(result + place, slope.to(result.dtype.element_ty), mask=inside)
        total += slope
    tl.store(totals + tl.program_id(1) * size + column, tl.sum(total, 0), mask=column < size)
