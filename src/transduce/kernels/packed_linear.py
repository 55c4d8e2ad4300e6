"""A trained matrix in, one packed for fast reading out: W x + b in fp32, bf16 or 8-bit whole numbers."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from transduce.errors import InputError
from transduce.inference.quantisation import round_rows
from transduce.kernels.native.library import library
from transduce.kernels.native.linear import Product

Reading = Callable[[Tensor], Tensor]


class Packed(nn.Module, ABC):
    """What stands for a linear layer once its weights are packed: it reads, and learns no more."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.product: Product | None = None  # by our own kernels, where they are

    def forward(self, values: Tensor) -> Tensor:
        return self.read(values)

    @cached_property
    def read(self) -> Reading:
        return self.direct()

    @abstractmethod
    def direct(self, *, rectified: bool = False) -> Reading:
        """The same as a plain function, at the least cost a call; rectified: max(0, W x + b) in the same pass."""

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


class Float32(Packed):
    """W x + b with W laid out once as the processor's kernel reads it: the same numbers, to a rounding

    Without kernels of our own a single row through a matrix that grows it is read faster input by input,
    y = b + sum_i x_i w_i, so such a matrix lies there both ways: 2.5 against 4.1 ms for 512 to 32,000, and with five
    rows 8.9 against 7.2.
    """

    kind = torch.float32

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        if self.kind == torch.float32 and library() is not None:
            self.product = Product(layer.weight, None, layer.bias)
            return
        self.weight = layer.weight.detach().to(self.kind)
        self.prepacked = self.kind == torch.float32 or has_bf16_packing()
        if self.prepacked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
        self.bias = None if layer.bias is None else layer.bias.detach().to(self.kind)
        grows = self.kind == torch.float32 and self.bias is not None and self.out_features > self.in_features
        self.inward = layer.weight.detach().float().t().contiguous() if grows else None

    def direct(self, *, rectified: bool = False) -> Reading:
        if self.product is not None:
            return self.product.reading(rectified)
        read = torch.ops.mkldnn._linear_pointwise.default
        kind, weight, bias, after = self.kind, self.weight, self.bias, "relu" if rectified else "none"
        inward, size = self.inward, self.in_features

        def unpacked(values: Tensor) -> Tensor:
            output = nn.functional.linear(values.to(kind), weight, bias)
            return (output.relu_() if rectified else output).to(values.dtype)

        def several(values: Tensor) -> Tensor:
            made: Tensor = read(values.to(kind), weight, bias, after, [], "")
            return made.to(values.dtype)

        def any_number(values: Tensor) -> Tensor:
            if values.numel() != size:
                return several(values)
            made = torch.addmm(bias, values.view(1, size), inward)  # type: ignore[arg-type]
            return (made.relu_() if rectified else made).view(*values.shape[:-1], -1)

        if not self.prepacked:
            return unpacked
        return several if inward is None else any_number


class BFloat16(Float32):
    """the same with W and x in 16 bits; everything between the matrices stays as it was"""

    kind = torch.bfloat16


class Int8(Packed):
    """x W^T in 8-bit whole numbers, added up in 32 bits: w = s round(w / s), s = max|w| / 127 for each output

    The inputs are rounded as they come: by our own kernels with one scale a row, x = s round(x / s), s = max|x| / 127.
    Torch's, where there is no compiler, take one scale a call (Jacob 2018), so that a row may differ with its
    neighbours by a rounding; without the instruction for sums of 8-bit products they add pairs in 16 bits, which 8-bit
    inputs could overflow: there inputs take 7 bits.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        whole, scales = round_rows(layer.weight)
        if library() is not None:
            self.product = Product(whole, scales, layer.bias)
            return
        bias = None if layer.bias is None else layer.bias.detach().float()
        self.reduced = not has_8bit_sums()
        self.packed = _pack(whole, scales, bias)

    def direct(self, *, rectified: bool = False) -> Reading:
        if self.product is not None:
            return self.product.reading(rectified)
        ops = torch.ops.quantized
        # Past the look for tensors of other kinds, which at 4 of 18 microseconds is a good part of a small product.
        read = (ops.linear_relu_dynamic if rectified else ops.linear_dynamic).default._op
        packed, reduced = self.packed, self.reduced
        return lambda values: read(values, packed, reduced)  # type: ignore[no-any-return]


def has_bf16_packing() -> bool:
    """Whether oneDNN prepacks bf16 weights: only on processors with AVX-512 or AVX-NE-CONVERT."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_8bit_sums() -> bool:
    known = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(known()) if known is not None else False


def _pack(whole: Tensor, scales: Tensor, bias: Tensor | None) -> torch.ScriptObject:
    engines = torch.backends.quantized.supported_engines
    engine = next((name for name in ("fbgemm", "qnnpack") if name in engines), None)
    if engine is None:
        raise InputError("this build of torch has no 8-bit kernels", remedy="choose precision fp32 or bf16")
    before = torch.backends.quantized.engine
    with warnings.catch_warnings():  # torch speaks of another library that would do this
        warnings.simplefilter("ignore")
        try:
            torch.backends.quantized.engine = engine
            zeros = torch.zeros(len(scales), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(whole, scales, zeros, 0)
            packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(weight, bias)
        finally:
            torch.backends.quantized.engine = before
    return packed
