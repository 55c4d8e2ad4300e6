"""Triton kernels of cross-entropy."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_forward(
    logits, labels, lses, nll, uniform, stride, size, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    """A row of logits is read in tiles. Each column of a tile has its own maximum: no exchange between threads."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, tile_rows)[:, None] * tile_columns + tl.arange(0, tile_columns)[None]
    largest = tl.full((tile_columns,), -1e30, tl.float32)
    total = tl.zeros((tile_columns,), tl.float32)
    logit_sum = tl.zeros((tile_columns,), tl.float32)
    logits += row * stride
    unmasked = size // (tile_rows * tile_columns) * (tile_rows * tile_columns)
    for begin in range(0, unmasked, tile_rows * tile_columns):  # without a mask: 16 bytes at a time
        logit = tl.load(logits + begin + tile).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(logit, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logit - new_largest[None]), 0)
        logit_sum += tl.sum(logit, 0)
        largest = new_largest
    inside = unmasked + tile < size
    logit = tl.load(logits + unmasked + tile, mask=inside, other=-1e30).to(tl.float32)
    new_largest = tl.maximum(largest, tl.max(logit, 0))
    total = total * tl.exp(largest - new_largest) + tl.sum(tl.where(inside, tl.exp(logit - new_largest[None]), 0.0), 0)
    logit_sum += tl.sum(tl.where(inside, logit, 0.0), 0)
    peak = tl.max(new_largest, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(new_largest - peak), 0))
    label = tl.maximum(tl.load(labels + row), 0)
    tl.store(lses + row, lse)
    tl.store(nll + row, lse - tl.load(logits + label).to(tl.float32))
    tl.store(uniform + row, lse - tl.sum(logit_sum, 0) / size)


@triton.jit
def logit_grad(logit, lse, is_label, size, smoothing):
    """d loss / d x"""
    return tl.exp(logit - lse) - smoothing / size - tl.where(is_label, 1.0 - smoothing, 0.0)


@triton.jit
def cross_entropy_backward(
    logits, labels, lses, factor, result, stride, result_stride, size, smoothing, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, block)
    label = tl.load(labels + row)
    lse = tl.load(lses + row)
    weight = tl.where(label >= 0, tl.load(factor).to(tl.float32), 0.0)
    logits += row * stride
    result += row * result_stride
    for begin in range(0, size // block * block, block):
        offset = begin + tile
        logit = tl.load(logits + offset).to(tl.float32)
        grad = logit_grad(logit, lse, offset == label, size, smoothing)
        tl.store(result + offset, (grad * weight).to(result.dtype.element_ty))
    offset = size // block * block + tile
    inside = offset < size
    logit = tl.load(logits + offset, mask=inside, other=-1e30).to(tl.float32)
    grad = logit_grad(logit, lse, offset == label, size, smoothing)
    tl.store(result + offset, (grad * weight).to(result.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_backward_sums(
    logits, labels, lses, factor, result, sums, count, size, smoothing,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """The same for contiguous rows, in tiles; and the sums of the columns over the rows of this program."""
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    weight = tl.load(factor).to(tl.float32)
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(count, tile_rows), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * tile_rows + tl.arange(0, tile_rows)
        inside = (row < count)[:, None] & (column < size)[None]
        offset = row[:, None] * size + column[None]
        label = tl.load(labels + row, mask=row < count, other=-1)[:, None]
        lse = tl.load(lses + row, mask=row < count, other=0.0)[:, None]
        logit = tl.load(logits + offset, mask=inside, other=-1e30).to(tl.float32)
        grad = logit_grad(logit, lse, column[None] == label, size, smoothing) * tl.where(label >= 0, weight, 0.0)
        tl.store(result + offset, grad.to(result.dtype.element_ty), mask=inside)
        total += grad
    tl.store(sums + tl.program_id(1) * size + column, tl.sum(total, 0), mask=column < size)
