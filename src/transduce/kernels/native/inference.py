"""Native kernels of inference: packed linear layers, Transformer blocks, top-k, and a decoding step as one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from transduce.flow import Shortlists
from transduce.kernels.native.library import library

HUGE_PAGE_BYTES = 1 << 21  # size from which huge pages pay


class LinearStruct(ctypes.Structure):
    """`Linear` of linear.h"""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("int8", ctypes.c_int64),
    )


class NativeLinear:
    """x W^T + b; in int8 w = s round(w / s), x = s round(x / s), s = max|.| / 127 per output and per row."""

    def __init__(self, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        """weight: O I in fp32, or in int8 with its scales (O)."""
        self.kernels = kernels = library()
        assert kernels is not None, "check library() first"
        self.outputs, self.inputs = weight.shape
        panel = kernels.transduce_panel()
        padded = -(-self.outputs // panel) * panel
        weight = (weight.detach().float() if scales is None else weight).contiguous()
        # The C struct holds the addresses of these tensors, so they must live as long as this object.
        self.sums = torch.zeros(padded, dtype=torch.int32)
        self.scales = None if scales is None else F.pad(scales.detach().float(), (0, padded - self.outputs))
        self.bias = None if bias is None else F.pad(bias.detach().float(), (0, padded - self.outputs))
        if self.scales is None:
            self.weights = _empty_in_huge_pages(kernels, padded * self.inputs, torch.float32)
            kernels.transduce_pack_fp32(weight.data_ptr(), *weight.shape, self.weights.data_ptr())
        else:
            self.weights = _empty_in_huge_pages(kernels, padded * (-(-self.inputs // 4) * 4), torch.int8)
            kernels.transduce_pack_int8(weight.data_ptr(), *weight.shape, self.weights.data_ptr(), self.sums.data_ptr())
        addresses = [None if one is None else one.data_ptr() for one in (self.weights, self.scales, self.bias)]
        self.struct = LinearStruct(*addresses, self.sums.data_ptr(), self.inputs, self.outputs, self.scales is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeLinear:
        return self  # immutable

    @cached_property
    def output_major(self) -> Tensor:
        """The same weights row by row, padded with 0: for a call that reads a few outputs only (shortlists.h)."""
        assert self.kernels is not None
        panel = self.kernels.transduce_panel()
        interleaved = 1 if self.scales is None else 4  # consecutive inputs of one output
        group = panel // 4 * interleaved
        panels = self.weights.view(-1, len(self.weights) // len(self.sums) // interleaved, panel, interleaved)
        rows = panels.transpose(1, 2).reshape(len(self.sums), -1)[: self.outputs]
        size = self.outputs * (-(-rows.size(1) // group) * group)
        padded = _empty_in_huge_pages(self.kernels, size, self.weights.dtype).zero_().view(self.outputs, -1)
        padded[:, : rows.size(1)] = rows
        return padded

    def function(self, relu: bool = False) -> Callable[[Tensor], Tensor]:
        """The layer as a plain function; relu: max(0, W x + b)."""
        assert self.kernels is not None
        linear, threads = self.kernels.transduce_linear, torch.get_num_threads
        address, outputs = ctypes.addressof(self.struct), self.outputs

        def forward(values: Tensor, owner: NativeLinear = self) -> Tensor:  # the owner keeps the struct alive
            rows = values.to(torch.float32).contiguous()
            result = torch.empty((*values.shape[:-1], outputs), dtype=torch.float32)
            if linear(address, rows.data_ptr(), result.numel() // outputs, result.data_ptr(), relu, threads()):
                raise MemoryError("out of memory in a linear layer")
            return result.to(values.dtype)

        return forward


def _empty_in_huge_pages(kernels: ctypes.CDLL, size: int, dtype: torch.dtype) -> Tensor:
    """An empty tensor; a large one is advised to huge pages before its first write."""
    empty = torch.empty(size, dtype=dtype)
    if empty.nbytes >= HUGE_PAGE_BYTES:
        kernels.transduce_advise_huge_pages(empty.data_ptr(), empty.nbytes)
    return empty


MAX_K = 32  # the best scores are held in a sorted list, which pays only while it is short


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the k <= MAX_K best of the last axis (fp32, contiguous), the earlier of two equal ones"""
    kernels = library()
    assert kernels is not None, "check library() first"
    size, shape = scores.size(-1), (*scores.shape[:-1], k)
    values, indices = torch.empty(shape), torch.empty(shape, dtype=torch.long)
    kernels.transduce_top_k(scores.data_ptr(), scores.numel() // size, size, k, values.data_ptr(), indices.data_ptr())
    return values, indices


class TopKStruct(ctypes.Structure):
    """`TopKRequest` of top_k.h"""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("num_suppressed", ctypes.c_int64),
        ("suppressed", ctypes.c_void_p),
        ("log_probs", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("shortlists", ctypes.c_void_p),
    )


class ShortlistsStruct(ctypes.Structure):
    """`Shortlists` of top_k.h"""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "tokens", "offsets", "list_ids"))
    tensors: tuple[Tensor, ...] = ()  # the tensors at these addresses, kept alive


class TopKBuffers:
    """Output buffers of a native top-k: log-probabilities and tokens, R M."""

    def __init__(
        self, rows: int, k: int, suppressed: Sequence[int], shortlists: ShortlistsStruct | None = None
    ) -> None:
        self.log_probs, self.tokens = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.long)
        self.suppressed = (ctypes.c_int64 * len(suppressed))(*suppressed)
        self.shortlists = shortlists  # kept alive: the struct below holds its address
        self.struct = TopKStruct(
            k,
            len(suppressed),
            ctypes.addressof(self.suppressed),
            self.log_probs.data_ptr(),
            self.tokens.data_ptr(),
            None if shortlists is None else ctypes.addressof(shortlists),
        )


def shortlists_struct(layer: NativeLinear, lists: Shortlists | None) -> ShortlistsStruct | None:
    """The shortlist of each source (see `flow.Shortlists`) with the rows of the output layer that they select."""
    if lists is None:
        return None
    tensors = layer.output_major, lists.tokens, lists.begins, lists.which
    struct = ShortlistsStruct(*(one.data_ptr() for one in tensors))
    struct.tensors = tensors
    return struct


def linear_top_k(
    layer: NativeLinear, values: Tensor, k: int, suppressed: Sequence[int] = (), lists: Shortlists | None = None
) -> TopKBuffers:
    """The k best of log softmax(W x + b) of each row (R D), the earlier of two equal ones; with lists, one per row.

    A decoding step (`NativeDecoder`) includes this; alone, it lets the tests compare the output layer with torch.
    """
    assert layer.kernels is not None
    values = values.float().contiguous()
    result = TopKBuffers(len(values), k, suppressed, shortlists_struct(layer, lists))
    request, address = ctypes.addressof(result.struct), ctypes.addressof(layer.struct)
    if layer.kernels.transduce_linear_top_k(address, values.data_ptr(), len(values), request, torch.get_num_threads()):
        raise MemoryError("out of memory in the output layer")
    return result


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


NormParameters = tuple[Tensor | None, Tensor | None, float]  # weight, bias, epsilon
KeysValues = tuple[Tensor, Tensor]


def norm_struct(norm: NormParameters | None) -> NormStruct | None:
    """The struct holds the addresses of the parameters, which must live as long."""
    return None if norm is None else NormStruct(_address(norm[0]), _address(norm[1]), norm[2])


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
        self.final_norm = norm_struct(final_norm)

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
