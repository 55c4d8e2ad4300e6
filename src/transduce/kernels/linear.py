"""Linear layers: in training with an activation, joint, over a vocabulary; packed in advance for inference.

The fused form computes the same three matrix products as torch's layer. A ReLU is part of the first, the gradients of
an activation and of the bias are one pass over the rows, and the gradient of the weights is computed in fp32.

Under autocast every matrix is cast by a kernel of its own, more than a hundred small ones a pass, and the matrices of
joint projections are concatenated. `WEIGHT_CAST` casts them together into one buffer, in which matrices that are
multiplied together are adjacent.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transduce.errors import InputError
from transduce.kernels import dispatch
from transduce.kernels.dispatch import Backend, Operation, is_plain_linear, matmul_dtype, native_kernels
from transduce.kernels.native.inference import NativeLinear
from transduce.kernels.native.library import library

ALIGNMENT = 8  # numbers, 16 bytes: tensor cores read from multiples of it
TILE_ROWS, TILE_COLUMNS = 64, 64  # of the kernel that sums columns
PROGRAMS = 1024
LOGIT_ALIGNMENT = 64  # numbers: 128 bytes in 16 bits
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
VIEWS = {Tensor.view, Tensor.flatten, Tensor.unflatten, Tensor.transpose}
LinearFunction = Callable[[Tensor], Tensor]
INT8_MAX = 127


def castable_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model whose weights are cast together; the output projection pads other widths itself."""
    linear = (layer for layer in model.modules() if type(layer) is nn.Linear)
    return [layer for layer in linear if layer.out_features % ALIGNMENT == 0]


@contextmanager
def cast_weights(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Inside, `weight_cast` finds the weights of these layers ready, in a captured training pass on a GPU."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    weights += [layer.bias for layer in layers if layer.bias is not None]
    weights = list(dict.fromkeys(weights))  # tied weights once
    dtype = matmul_dtype(weights[0]) if weights else None
    if not weights or dtype == weights[0].dtype or not dispatch.fused_training(weights[0]):
        yield
        return
    offsets = [0, *accumulate(-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in weights)]
    buffer = torch.empty(offsets[-1], dtype=dtype, device=weights[0].device)
    copies = [buffer[start : start + one.numel()].view(one.shape) for start, one in zip(offsets, weights, strict=False)]
    with torch.no_grad():
        torch._foreach_copy_(copies, weights)
    with dispatch.training_pass(cast_weights=dict(zip(weights, copies, strict=True))):
        yield


def weight_cast_reference(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(weights)).to(dtype) if len(weights) > 1 else weights[0].to(dtype)


def _is_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    ready = dispatch.current_pass().cast_weights
    copies = [ready[weight] for weight in weights if weight in ready]
    return len(copies) == len(weights) and copies[0].dtype == dtype and _adjacent(copies)


def _from_buffer(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    ready = dispatch.current_pass().cast_weights
    first = ready[weights[0]]
    return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())


def _adjacent(copies: Sequence[Tensor]) -> bool:
    return all(b.storage_offset() - a.storage_offset() == a.numel() for a, b in pairwise(copies))


WEIGHT_CAST = Operation("weight_cast", weight_cast_reference, (Backend("shared_buffer", _is_cast, _from_buffer),))


@torch.no_grad()
def weight_cast(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices or biases, concatenated along the outputs, in this precision."""
    result: Tensor = WEIGHT_CAST(weights, dtype)
    return result


class LinearOutput(Tensor):
    """The output y = W x + b of a linear layer, whose bias gradient the next operation may compute.

    The gradient of b is the sum over the rows of dL/dy. An operation that computes dL/dy can sum it in the same pass.
    Such an operation takes `raw` and `biases` as inputs, and returns the gradients of both. Every other function reads
    y itself, whose backward pass (`_BiasGrad`) sums the rows. The gradients of several readers add up as usual. Views
    of y are LinearOutputs as well; the result of every other function is a plain tensor.
    """

    raw: Tensor  # y, but no gradient reaches `biases` from it; may have padding columns, whose gradient must be 0
    biases: tuple[Tensor, ...]
    parts: int  # number of parts of the joint projection that y is one of: all of them are read raw, or none

    @staticmethod
    def of(y: Tensor, raw: Tensor, biases: Sequence[Tensor] = (), parts: int = 1) -> LinearOutput:
        output = y.as_subclass(LinearOutput)
        output.raw, output.biases, output.parts = raw, tuple(biases), parts
        return output

    @property
    def padding(self) -> int:
        return self.raw.size(-1) - self.size(-1)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            given = args[0] if args else None
            if func not in VIEWS or not isinstance(given, LinearOutput):
                return result
            if given.padding and (func is not Tensor.flatten or result.size(-1) != given.size(-1)):
                return result
            return LinearOutput.of(result, func(given.raw, *args[1:], **(kwargs or {})), given.biases, given.parts)


def plain(x: Tensor) -> Tensor:
    """x as a plain tensor."""
    return x.as_subclass(Tensor) if isinstance(x, LinearOutput) else x


def uncast_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the precision of the two, also under autocast: likelihoods are no sums in bf16."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class _BiasGrad(torch.autograd.Function):
    """The identity, whose backward pass sums the rows of the gradient for the biases."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *biases: Tensor) -> Tensor:
        ctx.sizes, ctx.dtype = [len(bias) for bias in biases], biases[0].dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        grad = grads[0].contiguous()
        sums = column_sums(grad.flatten(0, -2))[1]
        return grad, *sums.to(ctx.dtype).split(ctx.sizes)


class _FusedLinear(torch.autograd.Function):
    """`matrix` and `bias` are low-precision copies of the parameters, which receive the gradients: first all weights,
    then all biases. Without an activation the gradients of the biases are left to the reader of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, activation: str, *parameters: Tensor
    ) -> Tensor:
        relu = activation == "relu"  # its gradient follows from its output
        if bias is None:
            y = x @ matrix.t()
            y = y.relu_() if relu else y
        else:
            y = (torch._addmm_activation if relu else torch.addmm)(bias, x, matrix.t())
        ctx.save_for_backward(x, matrix, y if activation else None)
        ctx.dtype, ctx.biased, ctx.activation = parameters[0].dtype, bias is not None, activation
        ctx.sizes = [len(one) for one in parameters if one.dim() == 2]
        return y if relu or not activation else ACTIVATIONS[activation](y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, before = ctx.saved_tensors
        grad, sums = grads[0].contiguous(), None
        if ctx.activation:
            grad, sums = column_sums(grad, before, ctx.activation)
        x_grad = grad @ matrix if ctx.needs_input_grad[0] else None
        result: list[Tensor | None] = [None] * len(ctx.sizes)
        if any(ctx.needs_input_grad[4 : 4 + len(result)]):
            result = list(weight_grad(grad, x, ctx.dtype).split(ctx.sizes))
        if ctx.biased and sums is not None:
            result += sums.to(ctx.dtype).split(ctx.sizes)
        return x_grad, None, None, None, *result


def linear_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = ""
) -> Tensor:
    """f(W x + b), f an activation or the identity, W and b those of several layers, concatenated: ... I -> ... O"""
    y = F.linear(x, torch.cat(list(weights)), torch.cat(list(biases)) if biases else None)
    return ACTIVATIONS[activation](y) if activation else y


def accepts_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "") -> bool:
    """In a captured training pass, in a precision of the tensor cores."""
    return dispatch.fused_training(x) and x.numel() > 0 and matmul_dtype(x) in dispatch.TENSOR_CORE_DTYPES


def fused_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "") -> Tensor:
    dtype = matmul_dtype(x)
    rows, matrix = x.to(dtype).flatten(0, -2), weight_cast(weights, dtype)
    bias = weight_cast(biases, dtype) if biases else None
    with torch.autocast(x.device.type, enabled=False):
        parameters = (*weights, *biases) if activation else tuple(weights)
        y: Tensor = _FusedLinear.apply(rows, matrix, bias, activation, *parameters)
    y = y.unflatten(0, x.shape[:-1])
    if activation or not any(bias.requires_grad for bias in biases):
        return y
    return LinearOutput.of(_BiasGrad.apply(y, *biases), y, biases)


LINEAR = Operation("linear", linear_reference, (Backend("triton", accepts_linear, fused_linear),))


def linear(layer: nn.Module, x: Tensor, activation: str | None = None) -> Tensor:
    """f(W x + b), f an activation or the identity: ... I -> ... O"""
    if accepts_linear(x, ()) and is_plain_linear(layer):
        return fused_linear(x, *_parameters([layer]), activation or "")
    y: Tensor = layer(x)
    return ACTIVATIONS[activation](y) if activation else y


def joint_linear(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The output of each layer for the same rows (... D), in training as one matrix product.

    The rows are then read and, under autocast, cast once, and their gradient is one sum. Outside training the layers
    are called: their weights may be packed in advance.
    """
    if not can_join(layers):
        return [layer(x) for layer in layers]
    weights, biases = _parameters(layers)
    return split(LINEAR(x, weights, biases), [len(weight) for weight in weights])


def can_join(layers: Sequence[nn.Module]) -> bool:
    return torch.is_grad_enabled() and all(map(is_plain_linear, layers))


def _parameters(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]


def weight_grad(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad^T x, N O and N I -> O I: the gradient of a weight matrix, in the precision it is stored in."""
    if grad.is_cuda and dtype == torch.float32:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return (grad.t() @ x).to(dtype)


def column_sums(values: Tensor, before: Tensor | None = None, activation: str = "") -> tuple[Tensor, Tensor]:
    """values (N O) and the sums of their columns (O, fp32); both times f'(before) where an activation f is given."""
    from transduce.kernels.triton.training import sum_columns

    count, size = values.shape
    across = -(-size // TILE_COLUMNS)
    down = max(1, min(-(-count // TILE_ROWS), PROGRAMS // across))
    result = values if before is None else torch.empty_like(values)
    sums = values.new_empty(down, size, dtype=torch.float32)
    tile = {"tile_rows": TILE_ROWS, "tile_columns": TILE_COLUMNS, "num_warps": 4}
    sum_columns[(across, down)](
        values, before, result, sums, count, size, values.stride(0), activation=activation, **tile
    )
    if down == 1:
        return result, sums[0]
    total = values.new_empty(size, dtype=torch.float32)
    sum_columns[(across, 1)](sums, None, sums, total, down, size, size, activation="", **tile)
    return result, total


def split_reference(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """... D -> parts of these sizes, which add up to D"""
    return tuple(x.split(list(sizes), -1))


class _Split(torch.autograd.Function):
    """Torch copies the gradients of the parts into a new tensor; adjacent gradients need no copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.shape = sizes, x.shape
        return tuple(one.view_as(one) for one in x.split(list(sizes), -1))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if adjacent(grads) and grads[0].stride(-2) == ctx.shape[-1]:
            return grads[0].as_strided(ctx.shape, grads[0].stride()), None
        return torch.cat(grads, -1), None


def adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether these are parts of the same rows, one right after the other."""
    first = parts[0]
    # A row of B H T K is H K, of any other shape the last dimension.
    width = first.size(-1) * (first.size(1) if first.dim() == 4 else 1)
    alike = all(
        one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and one.stride() == first.stride()
        and one.shape == first.shape
        and one.dtype == first.dtype
        for one in parts
    )
    return alike and all(b.storage_offset() - a.storage_offset() == width for a, b in pairwise(parts))


def _accepts_split(x: Tensor, sizes: Sequence[int]) -> bool:
    return dispatch.fused_training(x)


def _split_in_place(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = _Split.apply(x, tuple(sizes))
    if not isinstance(x, LinearOutput) or len(x.biases) != len(parts):
        return parts
    raws: tuple[Tensor, ...] = _Split.apply(x.raw, tuple(sizes))
    joint = zip(parts, raws, x.biases, strict=True)
    return tuple(LinearOutput.of(part, raw, [bias], len(parts)) for part, raw, bias in joint)


SPLIT = Operation("split", split_reference, (Backend("in_place", _accepts_split, _split_in_place),))


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """... D -> parts of these sizes, which add up to D; their gradients are joined without a copy where they can be."""
    return list(SPLIT(x, sizes))


class _PaddedProjection(torch.autograd.Function):
    """W x + b with rows of padded length.

    Tensor cores move 16 bytes at a time. The rows of a vocabulary of 50,257 in bf16 do not begin at multiples of that,
    and the three products of the output layer fall back to kernels that are several times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        size = len(weight)
        padded = -(-size // LOGIT_ALIGNMENT) * LOGIT_ALIGNMENT
        matrix = x.new_zeros(padded, weight.size(1))
        matrix[:size] = weight
        if bias is None:
            result = x @ matrix.t()
        else:
            padded_bias = x.new_zeros(padded)
            padded_bias[:size] = bias
            result = torch.addmm(padded_bias, x, matrix.t())
        ctx.save_for_backward(x, matrix)
        ctx.size, ctx.dtype, ctx.biased = size, weight.dtype, bias is not None
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, matrix = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_weight = weight_grad(grad, x, ctx.dtype)[: ctx.size]
        to_bias = column_sums(grad)[1][: ctx.size].to(ctx.dtype) if ctx.biased else None
        return grad @ matrix, to_weight, to_bias


def output_projection_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b: ... D -> ... V"""
    return F.linear(x, weight, bias)


def accepts_padding(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """In training on a GPU, for a vocabulary whose rows are not aligned."""
    ready = torch.is_grad_enabled() and not dispatch.compiling() and dispatch.runs_triton(x)
    return ready and len(weight) % 8 > 0


def padded_projection(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.to(matmul_dtype(x)).flatten(0, -2)
    with torch.autocast(x.device.type, enabled=False):
        raw: Tensor = _PaddedProjection.apply(rows, weight, bias)
    raw = raw.unflatten(0, x.shape[:-1])
    return LinearOutput.of(raw[..., : len(weight)], raw)


OUTPUT_PROJECTION = Operation(
    "output_projection", output_projection_reference, (Backend("triton", accepts_padding, padded_projection),)
)


def output_projection(layer: nn.Module, x: Tensor) -> Tensor:
    """Logits W x + b: ... D -> ... V

    In training they are a LinearOutput: torch's gradient of a matrix product does not need them, so the loss that
    reads them may write their gradient over them.
    """
    if not is_plain_linear(layer):
        logits: Tensor = layer(x)
        return logits
    weight, bias = _parameters([layer])[0][0], getattr(layer, "bias", None)
    if accepts_padding(x, weight, bias):
        return padded_projection(x, weight, bias)
    logits = linear(layer, x)
    if isinstance(logits, LinearOutput) or not logits.requires_grad or native_kernels(logits) is None:
        return logits
    return LinearOutput.of(logits, logits)


class QuantisedRows(NamedTuple):
    values: Tensor  # O I, int8
    scales: Tensor  # O


def quantise_rows(weight: Tensor) -> QuantisedRows:
    """w = s round(w / s), s = max|w| / 127 for each row (Jacob 2018). Quantising twice changes nothing more."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / INT8_MAX).clamp(min=torch.finfo(torch.float).tiny)
    return QuantisedRows((weight / scales[:, None]).round().to(torch.int8), scales)


class PackedLinear(nn.Module, ABC):
    """Replaces an nn.Linear whose weights are packed; it has no gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.native: NativeLinear | None = None  # where the native library is used

    def forward(self, values: Tensor) -> Tensor:
        return self.compute(values)

    @cached_property
    def compute(self) -> LinearFunction:
        return self.function()

    @abstractmethod
    def function(self, *, relu: bool = False) -> LinearFunction:
        """The layer as a plain function with the least overhead per call; relu: max(0, W x + b) in the same pass."""

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class PackedFloat32(PackedLinear):
    """W x + b with W reordered for the processor; results are those of nn.Linear up to rounding

    Without the native library a single row through a layer with more outputs than inputs is computed input by input,
    y = b + sum_i x_i w_i, from a transposed copy: 2.5 instead of 4.1 ms for 512 to 32,000. With five rows the reordered
    weights are faster: 7.2 instead of 8.9 ms.
    """

    dtype = torch.float32

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        if self.dtype == torch.float32 and library() is not None:
            self.native = NativeLinear(layer.weight, None, layer.bias)
            return
        self.weight = layer.weight.detach().to(self.dtype)
        self.prepacked = self.dtype == torch.float32 or has_bf16_packing()
        if self.prepacked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
        self.bias = None if layer.bias is None else layer.bias.detach().to(self.dtype)
        expands = self.dtype == torch.float32 and self.bias is not None and self.out_features > self.in_features
        self.transposed = layer.weight.detach().float().t().contiguous() if expands else None

    def function(self, *, relu: bool = False) -> LinearFunction:
        if self.native is not None:
            return self.native.function(relu)
        linear = torch.ops.mkldnn._linear_pointwise.default
        dtype, weight, bias, activation = self.dtype, self.weight, self.bias, "relu" if relu else "none"
        transposed, size = self.transposed, self.in_features

        def unpacked(values: Tensor) -> Tensor:
            output = nn.functional.linear(values.to(dtype), weight, bias)
            return (output.relu_() if relu else output).to(values.dtype)

        def reordered(values: Tensor) -> Tensor:
            result: Tensor = linear(values.to(dtype), weight, bias, activation, [], "")
            return result.to(values.dtype)

        def by_input(values: Tensor) -> Tensor:
            if values.numel() != size:
                return reordered(values)
            result = torch.addmm(bias, values.view(1, size), transposed)  # type: ignore[arg-type]
            return (result.relu_() if relu else result).view(*values.shape[:-1], -1)

        if not self.prepacked:
            return unpacked
        return reordered if transposed is None else by_input


class PackedBFloat16(PackedFloat32):
    """the same with W and x in bf16; activations between the layers stay in fp32"""

    dtype = torch.bfloat16


class PackedInt8(PackedLinear):
    """x W^T in int8 with int32 accumulation: w = s round(w / s), s = max|w| / 127 for each output

    Inputs are quantised on the fly. The native library uses one scale per row, s = max|x| / 127. Torch, where there is
    no compiler, uses one scale per call (Jacob 2018), so the rounding of a row depends on its batch. Without the VNNI
    instructions torch accumulates pairs in 16 bits, which 8-bit inputs could overflow: there inputs take 7 bits.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        values, scales = quantise_rows(layer.weight)
        if library() is not None:
            self.native = NativeLinear(values, scales, layer.bias)
            return
        bias = None if layer.bias is None else layer.bias.detach().float()
        self.reduce_range = not has_vnni()
        self.packed = _prepack(values, scales, bias)

    def function(self, *, relu: bool = False) -> LinearFunction:
        if self.native is not None:
            return self.native.function(relu)
        ops = torch.ops.quantized
        # `_op` skips the dispatch on tensor subclasses: 4 of the 18 microseconds of a small layer.
        linear = (ops.linear_relu_dynamic if relu else ops.linear_dynamic).default._op
        packed, reduce_range = self.packed, self.reduce_range
        return lambda values: linear(values, packed, reduce_range)  # type: ignore[no-any-return]


def has_bf16_packing() -> bool:
    """Whether oneDNN prepacks bf16 weights: only on processors with AVX-512 or AVX-NE-CONVERT."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_vnni() -> bool:
    """Whether the processor adds int8 products in 32 bits."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported()) if supported is not None else False


def _prepack(values: Tensor, scales: Tensor, bias: Tensor | None) -> torch.ScriptObject:
    engines = torch.backends.quantized.supported_engines
    engine = next((name for name in ("fbgemm", "qnnpack") if name in engines), None)
    if engine is None:
        raise InputError("this build of torch has no int8 kernels", remedy="choose precision fp32 or bf16")
    before = torch.backends.quantized.engine
    with warnings.catch_warnings():  # torch announces the deprecation of these functions
        warnings.simplefilter("ignore")
        try:
            torch.backends.quantized.engine = engine
            zeros = torch.zeros(len(scales), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(values, scales, zeros, 0)
            packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(weight, bias)
        finally:
            torch.backends.quantized.engine = before
    return packed
