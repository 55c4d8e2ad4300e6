"""Triton kernels of residual addition, dropout and norm."""

import triton
import triton.language as tl


@triton.jit
def hash32(bits):
    """A hash of 32 bits."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def keep_mask(offset, seed, threshold):
    """The dropout mask: a function of the seed and the offset, so that it need not be stored."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    return hash32(hash32(offset.to(tl.uint32) ^ low) + high) >= threshold.to(tl.uint32)


@triton.jit
def residual_sum(residual, x, seed, offset, inside, threshold, dropout_scale, drops: tl.constexpr):
    """residual + dropout(x), in fp32"""
    total = tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    if x is not None:
        addend = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        if drops:
            addend = tl.where(keep_mask(offset, tl.load(seed), threshold), addend * dropout_scale, 0.0)
        total += addend
    return total


@triton.jit
def dropout_add_forward(
    residual, x, seed, result, size, threshold, dropout_scale, drops: tl.constexpr, block: tl.constexpr
):
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < size
    total = residual_sum(residual, x, seed, offset, inside, threshold, dropout_scale, drops)
    tl.store(result + offset, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def dropout_backward(x, seed, result, size, threshold, dropout_scale, block: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < size
    addend = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    addend = tl.where(keep_mask(offset, tl.load(seed), threshold), addend * dropout_scale, 0.0)
    tl.store(result + offset, addend.to(result.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_forward(
    residual, x, seed, weight, bias, totals_out, result, means, inverse_stds, count, threshold, dropout_scale, eps,
    width: tl.constexpr, drops: tl.constexpr, centred: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    inside = (row < count)[:, None] & (column < width)[None]
    offset = row[:, None] * width + column[None]
    total = residual_sum(residual, x, seed, offset, inside, threshold, dropout_scale, drops)
    if totals_out is not None:
        tl.store(totals_out + offset, total.to(totals_out.dtype.element_ty), mask=inside)
    if centred:
        mean = tl.sum(total, 1) / width
        tl.store(means + row, mean, mask=row < count)
        total = tl.where(inside, total - mean[:, None], 0.0)
    inverse_std = 1 / tl.sqrt(tl.sum(total * total, 1) / width + eps)
    tl.store(inverse_stds + row, inverse_std, mask=row < count)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None]
    output = total * inverse_std[:, None] * weights
    if bias is not None:
        output += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None]
    tl.store(result + offset, output.to(result.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward(
    grads, second_grads, residual, x, seed, weight, means, inverse_stds, residual_grad, x_grad, sums,
    count, threshold, dropout_scale,
    width: tl.constexpr, drops: tl.constexpr, centred: tl.constexpr, keep_sum: tl.constexpr, sums_x: tl.constexpr,
    block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """`second_grads`: the gradient of the sum before the norm (keep_sum), or a second one of the norm's output.

    `sums_x`: the columns of x_grad are summed as well.
    """
    column = tl.arange(0, block)
    in_row = column < width
    weights = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)[None]
    weight_sums = tl.zeros((block,), tl.float32)
    bias_sums = tl.zeros((block,), tl.float32)
    x_sums = tl.zeros((block,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(count, rows), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * rows + tl.arange(0, rows)
        inside = (row < count)[:, None] & in_row[None]
        offset = row[:, None] * width + column[None]
        total = residual_sum(residual, x, seed, offset, inside, threshold, dropout_scale, drops)
        inverse_std = tl.load(inverse_stds + row, mask=row < count, other=0.0)[:, None]
        if centred:
            total -= tl.load(means + row, mask=row < count, other=0.0)[:, None]
        normed = tl.where(inside, total * inverse_std, 0.0)
        grad = tl.load(grads + offset, mask=inside, other=0.0).to(tl.float32)
        if second_grads is not None:
            other = tl.load(second_grads + offset, mask=inside, other=0.0).to(tl.float32)
            if not keep_sum:
                grad += other
        weight_sums += tl.sum(grad * normed, 0)
        bias_sums += tl.sum(grad, 0)
        grad *= weights
        input_grad = grad - normed * (tl.sum(grad * normed, 1) / width)[:, None]
        if centred:
            input_grad -= (tl.sum(grad, 1) / width)[:, None]
        input_grad *= inverse_std
        if second_grads is not None and keep_sum:
            input_grad += other
        tl.store(residual_grad + offset, input_grad.to(residual_grad.dtype.element_ty), mask=inside)
        if x is not None:
            if drops:
                input_grad = tl.where(keep_mask(offset, tl.load(seed), threshold), input_grad * dropout_scale, 0.0)
            tl.store(x_grad + offset, input_grad.to(x_grad.dtype.element_ty), mask=inside)
            if sums_x:
                x_sums += tl.sum(input_grad, 0)
    sums += tl.program_id(0) * (3 if sums_x else 2) * width + column
    tl.store(sums, weight_sums, mask=in_row)
    tl.store(sums + width, bias_sums, mask=in_row)
    if sums_x:
        tl.store(sums + 2 * width, x_sums, mask=in_row)
