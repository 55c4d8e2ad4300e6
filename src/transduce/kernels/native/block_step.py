"""Native Transformer blocks: one decoding step through a block, and whole sources through an encoder block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.kernels.native.library import library
from transduce.kernels.native.linear import LinearStruct, NativeLinear

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # in the order of block_step.h


class NormStruct(ctypes.Structure):
    """`Norm` of block_step.h"""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_double))


class BlockStruct(ctypes.Structure):
    """`Block` of block_step.h"""

    _fields_ = (
        ("linears", 7 * LinearStruct),
        ("norms", 3 * NormStruct),
        ("pre_norm", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("head_width", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("memory_scale", ctypes.c_double),
    )


class StepStruct(ctypes.Structure):
    """`Step` of block_step.h"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "beams", "capacity", "window")),
        *((name, ctypes.c_void_p) for name in ("row_ids", "positions", "cache_indirection", "keys", "values")),
        ("source_length", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("memory_keys", "memory_values", "mask_bias")),
        ("threads", ctypes.c_int64),
    )


class EncoderInputStruct(ctypes.Structure):
    """`EncoderInput` of encoder_block.h"""

    _fields_ = (
        ("sources", ctypes.c_int64),
        ("source_length", ctypes.c_int64),
        ("mask_bias", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


@dataclass(frozen=True)
class BlockLayers:
    """Layers and sizes of a block, as in block_step.h."""

    self_attention: tuple[NativeLinear, NativeLinear]  # joint query, key and value projection; output projection
    cross_attention: tuple[NativeLinear, NativeLinear] | None  # query projection; output projection
    feed_forward: tuple[NativeLinear, NativeLinear | None, NativeLinear]  # up, gate, down
    norms: Sequence[tuple[Tensor | None, Tensor | None, float]]  # weight, bias, epsilon of each sublayer, in order
    pre_norm: bool
    heads: int
    head_width: int
    activation: str
    scale: float
    memory_scale: float


class NativeBlock:
    """A Transformer block as one call: a decoding step (`step`), or whole sources (`encode`)."""

    def __init__(self, layers: BlockLayers) -> None:
        self.kernels = kernels = library()
        assert kernels is not None, "check library() first"
        self.layers, self.block_step = layers, kernels.transduce_block_step  # the struct holds addresses of the layers
        norms = list(layers.norms)
        if layers.cross_attention is None:
            norms.insert(1, (None, None, 0.0))
        linears = [*layers.self_attention, *(layers.cross_attention or (None, None)), *layers.feed_forward]
        self.struct = BlockStruct(
            (7 * LinearStruct)(*(LinearStruct() if one is None else one.struct for one in linears)),
            (3 * NormStruct)(*(NormStruct(_address(weight), _address(bias), eps) for weight, bias, eps in norms)),
            layers.pre_norm,
            layers.heads,
            layers.head_width,
            ACTIVATIONS.index(layers.activation),
            layers.scale,
            layers.memory_scale,
        )
        self.address = ctypes.addressof(self.struct)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeBlock:
        return self  # immutable

    def __call__(
        self,
        values: Tensor,  # R 1 D
        cache: tuple[Tensor, Tensor],  # B N L H K
        positions: Tensor,  # R
        indirection: Tensor,  # R L
        beams: int,
        window: int | None,
        memory: tuple[Tensor, Tensor, Tensor] | None,  # keys B H S K, values B H S K, mask bias B 1 1 S
    ) -> Tensor:
        """One decoding step: new rows through the block; their keys and values are written into the cache."""
        result = values.clone(memory_format=torch.contiguous_format)
        keys, cached_values = cache
        source_length, addresses = 0, (0, 0, 0)
        if memory is not None:
            source_length = memory[2].size(-1)
            addresses = (memory[0].data_ptr(), memory[1].data_ptr(), memory[2].data_ptr())
        step = StepStruct(
            len(result), beams, indirection.size(1), -1 if window is None else window,
            None, positions.data_ptr(), indirection.data_ptr(), keys.data_ptr(), cached_values.data_ptr(),
            source_length, *addresses, torch.get_num_threads(),
        )  # fmt: skip
        if self.block_step(self.address, ctypes.addressof(step), result.data_ptr()):
            raise MemoryError("out of memory in a decoding step")
        return result

    def encode(self, values: Tensor, mask_bias: Tensor) -> Tensor:
        """Whole sources (B S D) through an encoder block; mask_bias (B S): 0, or -inf for padding, left as it is."""
        assert self.kernels is not None
        result = values.clone(memory_format=torch.contiguous_format)
        mask_bias = mask_bias.contiguous()
        given = EncoderInputStruct(*mask_bias.shape, mask_bias.data_ptr(), torch.get_num_threads())
        if self.kernels.transduce_encoder_block(self.address, ctypes.addressof(given), result.data_ptr()):
            raise MemoryError("out of memory in an encoder block")
        return result


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
