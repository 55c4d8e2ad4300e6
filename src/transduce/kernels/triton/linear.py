"""Triton kernels of linear layers."""

import triton
import triton.language as tl


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
