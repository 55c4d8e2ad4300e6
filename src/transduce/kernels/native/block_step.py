"""The parts of a Transformer block in, one call that takes the rows of a search's step through all of it out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.kernels.native.library import library
from transduce.kernels.native.linear import Matrix, Product

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # in the order of blocks.h


class Norm(ctypes.Structure):
    """`Norm` of blocks.h"""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_double))


class Block(ctypes.Structure):
    """`Block` of blocks.h"""

    _fields_ = (
        ("matrices", 7 * Matrix),
        ("norms", 3 * Norm),
        ("before", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("memory_scale", ctypes.c_double),
    )


class Step(ctypes.Structure):
    """`Step` of blocks.h"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "beams", "room", "reach")),
        *((name, ctypes.c_void_p) for name in ("which", "places", "owners", "keys", "values")),
        ("columns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("memory_keys", "memory_values", "shade")),
        ("threads", ctypes.c_int64),
    )


class Sources(ctypes.Structure):
    """`Sources` of sources.h"""

    _fields_ = (
        ("sources", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("shade", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Parts:
    """What a block is made of: see blocks.h."""

    looks_back: tuple[Product, Product]  # queries, keys and values; the result
    looks_up: tuple[Product, Product] | None  # queries; the answer
    thinks: tuple[Product, Product | None, Product]  # grow, gate, shrink
    norms: Sequence[tuple[Tensor | None, Tensor | None, float]]  # weight, bias, epsilon of each residual, in order
    before: bool
    heads: int
    head: int
    activation: str
    scale: float
    memory_scale: float


class BlockStep:
    """As `LeanBlock.run` for a step of a search: rows (R 1 D) in, rows out, keys and values put into the room."""

    def __init__(self, parts: Parts) -> None:
        self.kernels = kernels = library()
        assert kernels is not None, "ask library() first"
        self.parts, self.run = parts, kernels.transduce_step  # the parts: addresses below point into them
        norms = list(parts.norms)
        if parts.looks_up is None:
            norms.insert(1, (None, None, 0.0))
        matrices = [*parts.looks_back, *(parts.looks_up or (None, None)), *parts.thinks]
        self.block = Block(
            (7 * Matrix)(*(Matrix() if one is None else one.matrix for one in matrices)),
            (3 * Norm)(*(Norm(_address(weight), _address(bias), eps) for weight, bias, eps in norms)),
            parts.before,
            parts.heads,
            parts.head,
            ACTIVATIONS.index(parts.activation),
            parts.scale,
            parts.memory_scale,
        )
        self.address = ctypes.addressof(self.block)

    def __deepcopy__(self, memo: dict[int, object]) -> BlockStep:
        return self  # it is only ever read

    def __call__(
        self,
        values: Tensor,  # R 1 D
        room: tuple[Tensor, Tensor],  # B N L H K
        places: Tensor,  # R
        owners: Tensor,  # R L
        beams: int,
        reach: int | None,
        memory: tuple[Tensor, Tensor, Tensor]
        | None,  # B H S K, B H S K, B 1 1 S: keys, values, what is added to scores
    ) -> Tensor:
        made = values.clone(memory_format=torch.contiguous_format)
        keys, kept = room
        columns, seen = 0, (0, 0, 0)
        if memory is not None:
            columns = memory[2].size(-1)
            seen = (memory[0].data_ptr(), memory[1].data_ptr(), memory[2].data_ptr())
        step = Step(
            len(made), beams, owners.size(1), -1 if reach is None else reach,
            None, places.data_ptr(), owners.data_ptr(), keys.data_ptr(), kept.data_ptr(),
            columns, *seen, torch.get_num_threads(),
        )  # fmt: skip
        if self.run(self.address, ctypes.addressof(step), made.data_ptr()):
            raise MemoryError("no memory for a step")
        return made

    def read(self, values: Tensor, shade: Tensor) -> Tensor:
        """As `LeanReading.run`: rows of whole sources (B S D), what is added to scores (B S); padding stays."""
        assert self.kernels is not None
        made = values.clone(memory_format=torch.contiguous_format)
        shade = shade.contiguous()
        given = Sources(*shade.shape, shade.data_ptr(), torch.get_num_threads())
        if self.kernels.transduce_read(self.address, ctypes.addressof(given), made.data_ptr()):
            raise MemoryError("no memory for a source")
        return made


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
