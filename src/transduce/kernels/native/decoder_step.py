"""Native decoding step: all blocks of a decoder and the top k of its output layer in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from transduce.kernels.native.block_step import BlockStruct, NativeBlock, NormStruct, StepStruct
from transduce.kernels.native.library import library
from transduce.kernels.native.linear import NativeLinear
from transduce.kernels.native.top_k import TopKBuffers

NormParameters = tuple[Tensor | None, Tensor | None, float]  # weight, bias, epsilon
KeysValues = tuple[Tensor, Tensor]


class DecoderStruct(ctypes.Structure):
    """`Decoder` of kernels.c"""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("final_norm", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


class NativeDecoder:
    """The blocks of a decoder and its final norm; the output layer comes with each call."""

    def __init__(self, blocks: Sequence[NativeBlock], final_norm: NormParameters | None) -> None:
        self.kernels = library()
        assert self.kernels is not None, "check library() first"
        self.parts = blocks, final_norm  # kept alive: the structs below hold their addresses
        self.blocks = (len(blocks) * BlockStruct)(*(one.struct for one in blocks))
        self.final_norm = None
        if final_norm is not None:
            weight, bias, epsilon = final_norm
            self.final_norm = NormStruct(*(None if one is None else one.data_ptr() for one in (weight, bias)), epsilon)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeDecoder:
        return self  # immutable

    def __call__(
        self,
        values: Tensor,  # R' D: embeddings of the active rows, overwritten
        step: StepStruct,
        caches: Sequence[KeysValues],  # each B N L H K
        memories: Sequence[KeysValues],  # each B H S K; empty: no cross-attention
        output: NativeLinear,
        result: TopKBuffers,
    ) -> None:
        """Writes the best tokens of each row into `result`, and the new keys and values into the caches."""
        assert self.kernels is not None
        norm = None if self.final_norm is None else ctypes.addressof(self.final_norm)
        decoder = DecoderStruct(ctypes.addressof(self.blocks), len(self.blocks), norm, ctypes.addressof(output.struct))
        cached = _addresses(caches)
        remembered = _addresses(memories) if memories else None
        if self.kernels.transduce_decoder_step(
            ctypes.addressof(decoder),
            ctypes.addressof(step),
            ctypes.addressof(cached),
            None if remembered is None else ctypes.addressof(remembered),
            values.data_ptr(),
            ctypes.addressof(result.struct),
        ):
            raise MemoryError("out of memory in a decoding step")


def _addresses(pairs: Sequence[KeysValues]) -> ctypes.Array[ctypes.c_void_p]:
    every = [part.data_ptr() for pair in pairs for part in pair]
    return (ctypes.c_void_p * len(every))(*every)
