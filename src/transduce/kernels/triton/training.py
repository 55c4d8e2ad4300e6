"""Triton kernels of training: residual addition, dropout and norm, cross-entropy, linear layers."""

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


@triton.jit
def activation_grad(x, activation: tl.constexpr):
    """f'(x) of an activation at its input; of a ReLU, at its output."""
    if activation == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    if activation == "silu":
        gate = tl.sigmoid(x)
        return gate * (1 + x * (1 - gate))
    if activation == "gelu_tanh":
        inner_grad = 0.7978845608 * (1 + 0.134145 * x * x)
        tanh = 2 * tl.sigmoid(2 * 0.7978845608 * x * (1 + 0.044715 * x * x)) - 1
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner_grad
    return 0.5 * (1 + tl.erf(x * 0.7071067812)) + x * 0.3989422804 * tl.exp(-0.5 * x * x)


@triton.jit
def sum_columns(
    values, before, result, sums, count, size, stride,
    activation: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of this program. With `before`, values * f'(before) are written and summed."""
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(count, tile_rows), tl.num_programs(1)):
        row = tl.cast(tile, tl.int64) * tile_rows + tl.arange(0, tile_rows)
        inside = (row < count)[:, None] & (column < size)[None]
        offset = row[:, None] * stride + column[None]
        value = tl.load(values + offset, mask=inside, other=0.0)
        value = value.to(tl.float32)
        if before is not None:
            value *= activation_grad(tl.load(before + offset, mask=inside, other=0.0).to(tl.float32), activation)
            tl.store(result + offset, value.to(result.dtype.element_ty), mask=inside)
        total += value
    tl.store(sums + tl.program_id(1) * size + column, tl.sum(total, 0), mask=column < size)
