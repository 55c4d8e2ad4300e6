"""Packed linear layers for inference: W x + b in fp32, bf16 or int8, with weights laid out once for fast reading."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.kernels.native.inference import NativeLinear
from transduce.kernels.native.library import library

LinearFunction = Callable[[Tensor], Tensor]
INT8_MAX = 127


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
