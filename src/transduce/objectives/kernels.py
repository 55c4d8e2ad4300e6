"""Pointers in, numbers written where they point: the GPU kernels of smoothed.py, imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def read_rows(scores, gold, sums, plain, smooth, stride, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, block)
    greatest = tl.full((block,), -1e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    added = tl.zeros((block,), tl.float32)
    scores += row * stride
    for begin in range(0, size // block * block, block):  # without a mask: 16 bytes at a time
        part = tl.load(scores + begin + tile).to(tl.float32)
        highest = tl.maximum(greatest, part)
        total = total * tl.exp(greatest - highest) + tl.exp(part - highest)
        added += part
        greatest = highest
    place = size // block * block + tile
    inside = place < size
    part = tl.load(scores + place, mask=inside, other=-1e30).to(tl.float32)
    highest = tl.maximum(greatest, part)
    total = total * tl.exp(greatest - highest) + tl.where(inside, tl.exp(part - highest), 0.0)
    added += tl.where(inside, part, 0.0)
    greatest = highest
    peak = tl.max(greatest, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(greatest - peak), 0))
    right = tl.maximum(tl.load(gold + row), 0)
    tl.store(sums + row, lse)
    tl.store(plain + row, lse - tl.load(scores + right).to(tl.float32))
    tl.store(smooth + row, lse - tl.sum(added, 0) / size)


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
        slope = tl.exp(part - lse) - smoothing / size - tl.where(place == right, 1.0 - smoothing, 0.0)
        tl.store(result + place, (slope * weight).to(result.dtype.element_ty))
    place = size // block * block + tile
    inside = place < size
    part = tl.load(scores + place, mask=inside, other=-1e30).to(tl.float32)
    slope = tl.exp(part - lse) - smoothing / size - tl.where(place == right, 1.0 - smoothing, 0.0)
    tl.store(result + place, (slope * weight).to(result.dtype.element_ty), mask=inside)
