"""The blocks of a decoder and its output layer in, one call from rows of a search to their best next tokens out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from transduce import contracts as asking
from transduce.kernels.native.block_step import Block, BlockStep, Norm, Step
from transduce.kernels.native.library import library
from transduce.kernels.native.linear import Product

Level = tuple[Tensor | None, Tensor | None, float]  # weight, bias, epsilon of a norm
Pair = tuple[Tensor, Tensor]  # keys and values


class Stack(ctypes.Structure):
    """`Stack` of kernels.c"""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("last", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


class Wanted(ctypes.Structure):
    """`Wanted` of choices.h"""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("bans", ctypes.c_int64),
        ("banned", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),
    )


class Lists(ctypes.Structure):
    """`Lists` of choices.h"""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "outputs", "begins", "which"))
    tensors: tuple[Tensor, ...] = ()  # what lies there, which lives as long as this does


class Best:
    """Room for the best tokens of each row, as the kernels fill it: log-probabilities and tokens, R M."""

    def __init__(self, rows: int, count: int, banned: Sequence[int], lists: Lists | None = None) -> None:
        self.logs, self.tokens = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
        self.banned = (ctypes.c_int64 * len(banned))(*banned)
        here = ctypes.addressof(self.banned)
        self.lists = lists  # the address below points into them
        few = None if lists is None else ctypes.addressof(lists)
        self.wanted = Wanted(count, len(banned), here, self.logs.data_ptr(), self.tokens.data_ptr(), few)


def outputs_of(product: Product, lists: asking.Shortlists | None) -> Lists | None:
    """The lists of each source (see `contracts.Lists`) as the kernels read them."""
    if lists is None:
        return None
    tensors = product.rows, lists.tokens, lists.begins, lists.which
    made = Lists(*(one.data_ptr() for one in tensors))
    made.tensors = tensors
    return made


def best(
    product: Product, values: Tensor, count: int, banned: Sequence[int] = (), lists: asking.Shortlists | None = None
) -> Best:
    """log softmax(W x + b) of the best outputs of each row (R D), the earlier of two that are equal.

    With lists, one a row, over each row's own.
    """
    assert product.kernels is not None
    values = values.float().contiguous()
    made = Best(len(values), count, banned, outputs_of(product, lists))
    wanted, matrix = ctypes.addressof(made.wanted), ctypes.addressof(product.matrix)
    if product.kernels.transduce_best(matrix, values.data_ptr(), len(values), wanted, torch.get_num_threads()):
        raise MemoryError("no memory for a product")
    return made


class Steps:
    """All blocks of a decoder, the norm behind them and its output layer."""

    def __init__(self, blocks: Sequence[BlockStep], last: Level | None) -> None:
        self.kernels = library()
        assert self.kernels is not None, "ask library() first"
        self.parts, self.level = blocks, last  # addresses below point into them
        self.blocks = (len(blocks) * Block)(*(one.block for one in blocks))
        addresses = [] if last is None else [None if one is None else one.data_ptr() for one in last[:2]]
        self.last = None if last is None else Norm(*addresses, last[2])

    def __deepcopy__(self, memo: dict[int, object]) -> Steps:
        return self  # it is only ever read

    def __call__(
        self,
        values: Tensor,  # R' D: the rows that are read, written over
        where: Step,
        rooms: Sequence[Pair],  # each B N L H K
        memories: Sequence[Pair],  # each B H S K; none: there is no memory
        output: Product,
        found: Best,
    ) -> None:
        """The best tokens of each row, written into `found`; keys and values are put into the rooms."""
        assert self.kernels is not None
        last = None if self.last is None else ctypes.addressof(self.last)
        stack = Stack(ctypes.addressof(self.blocks), len(self.blocks), last, ctypes.addressof(output.matrix))
        given = (stack, where, _addresses(rooms), _addresses(memories) if memories else None, values, found.wanted)
        if self.kernels.transduce_propose(*(_address(one) for one in given)):
            raise MemoryError("no memory for a step")


def _addresses(pairs: Sequence[Pair]) -> ctypes.Array[ctypes.c_void_p]:
    every = [part.data_ptr() for pair in pairs for part in pair]
    return (ctypes.c_void_p * len(every))(*every)


def _address(one: Tensor | ctypes.Structure | ctypes.Array[ctypes.c_void_p] | None) -> int | None:
    if one is None or isinstance(one, Tensor):
        return None if one is None else one.data_ptr()
    return ctypes.addressof(one)
