"""Native beam search: an encoder-decoder whose sources are encoded and searched without Python between two steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from transduce.flow import BOS, EOS
from transduce.kernels.native.inference import (
    BlockStruct,
    DecoderStruct,
    LinearStruct,
    NativeBlock,
    NativeDecoder,
    NativeLinear,
    NormParameters,
    norm_struct,
)
from transduce.kernels.native.library import library

SOURCE_BUFFERS = dict.fromkeys(("lengths", "max_lengths", "ended"), np.int64)  # B
BEAM_BUFFERS = dict.fromkeys(("positions", "finished_lengths", "complete"), np.int64)  # B N
BEAM_SCORES = dict.fromkeys(("totals", "finished_ranks"), np.float32)
TOKEN_BUFFERS = dict.fromkeys(("history", "finished_ids"), np.int64)  # B N L
TOKEN_SCORES = dict.fromkeys(("token_scores", "finished_scores"), np.float32)


class EntryStruct(ctypes.Structure):
    """`Entry` of beam_search.h"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "positions", "norm")),
        ("scale", ctypes.c_double),
        ("width", ctypes.c_int64),
    )


class EncoderDecoderStruct(ctypes.Structure):
    """`EncoderDecoder` of beam_search.h"""

    _fields_ = (
        ("source", EntryStruct),
        ("target", EntryStruct),
        ("encoder_blocks", ctypes.c_void_p),
        ("encoder_layers", ctypes.c_int64),
        ("encoder_norm", ctypes.c_void_p),
        ("memory_layers", ctypes.c_void_p),
        ("decoder", DecoderStruct),
    )


class SearchStruct(ctypes.Structure):
    """`Search` of beam_search.h"""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("slots", "beams", "capacity", "source_length", "num_results", "threads")),
        *((name, ctypes.c_int64) for name in ("bos", "eos", "num_suppressed")),
        ("power", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("suppressed", "caches", "memories", "mask_bias", "indirection")),
        *((name, ctypes.c_void_p) for name in ("positions", "history", "token_scores", "totals", "lengths")),
        *((name, ctypes.c_void_p) for name in ("max_lengths", "finished_ids", "finished_scores", "finished_ranks")),
        *((name, ctypes.c_void_p) for name in ("finished_lengths", "complete", "ended", "interrupt")),
    )


def _address(struct: ctypes.Structure | None) -> int | None:
    return None if struct is None else ctypes.addressof(struct)


@dataclass(frozen=True)
class EntryLayers:
    """Embeddings of tokens with their positions and norm."""

    weight: Tensor  # V D
    scale: float
    positions: Tensor | None  # P D
    norm: NormParameters | None


class NativeEntry:
    """The entry of an encoder or a decoder as a struct."""

    def __init__(self, layers: EntryLayers) -> None:
        weight = layers.weight.detach().float().contiguous()
        positions = None if layers.positions is None else layers.positions.detach().float().contiguous()
        norm = norm_struct(layers.norm)
        self.parts = layers, weight, positions, norm  # kept alive: the struct holds their addresses
        table = None if positions is None else positions.data_ptr()
        self.struct = EntryStruct(weight.data_ptr(), table, _address(norm), layers.scale, weight.size(1))


class NativeEncoderDecoder:
    """All layers of an encoder-decoder, for a search."""

    def __init__(
        self,
        entries: tuple[EntryLayers, EntryLayers],  # of encoder and decoder
        encoder: tuple[Sequence[NativeBlock], NormParameters | None],
        memory_layers: Sequence[NativeLinear],  # one for each decoder block: keys and values of the memory
        decoder: NativeDecoder,
        output: NativeLinear,
    ) -> None:
        self.kernels = library()
        assert self.kernels is not None, "check library() first"
        source, target = map(NativeEntry, entries)
        blocks, norm = encoder
        self.block_structs = (len(blocks) * BlockStruct)(*(one.struct for one in blocks))
        self.memory_structs = (len(memory_layers) * LinearStruct)(*(one.struct for one in memory_layers))
        self.norm = norm_struct(norm)
        self.parts = source, target, encoder, memory_layers, decoder, output  # kept alive
        self.decoder_blocks = decoder.parts[0]
        self.struct = EncoderDecoderStruct(
            source.struct,
            target.struct,
            ctypes.addressof(self.block_structs),
            len(blocks),
            _address(self.norm),
            ctypes.addressof(self.memory_structs),
            DecoderStruct(
                ctypes.addressof(decoder.blocks),
                len(decoder.blocks),
                _address(decoder.final_norm),
                ctypes.addressof(output.struct),
            ),
        )
        self.address = ctypes.addressof(self.struct)

    @property
    def width(self) -> int:
        """Width of the decoder."""
        return int(self.struct.target.width)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeEncoderDecoder:
        return self  # immutable


@dataclass(frozen=True)
class BeamSearchOptions:
    """What all sources of a search have in common."""

    beams: int
    num_results: int  # hypotheses of each source that the search has to return
    power: float  # ranks are total / length ** power
    suppressed: tuple[int, ...]
    source_columns: int
    threads: int


class NativeBeamSearch:
    """The buffers of a search, and its calls. The first columns of a history hold its tokens."""

    def __init__(self, model: NativeEncoderDecoder, options: BeamSearchOptions, interrupt: np.ndarray) -> None:
        """interrupt: an int64; while it is not 0, `advance` takes one step."""
        assert model.kernels is not None
        self.model, self.options, self.interrupt = model, options, interrupt
        self._enter, self._advance = model.kernels.transduce_search_enter, model.kernels.transduce_search_advance
        self._suppressed = np.array(options.suppressed, np.int64)
        self.slots, self.capacity, self.buffers = 0, 0, dict[str, np.ndarray]()
        self._caches: list[np.ndarray] = []
        self._memories: list[np.ndarray] = []

    def resize(self, slots: int, capacity: int) -> None:
        """Buffers of this size; those of smaller ones are copied."""
        beams, columns = self.options.beams, self.options.source_columns
        old, size = self.buffers, (min(slots, self.slots), min(capacity, self.capacity))
        per_token: dict[str, type[np.generic]] = {**TOKEN_BUFFERS, **TOKEN_SCORES, "indirection": np.int16}
        per_beam: dict[str, type[np.generic]] = {**BEAM_BUFFERS, **BEAM_SCORES}
        made = {name: np.zeros((slots, beams, capacity), kind) for name, kind in per_token.items()}
        made |= {name: np.zeros((slots, beams), kind) for name, kind in per_beam.items()}
        made |= {name: np.zeros(slots, kind) for name, kind in SOURCE_BUFFERS.items()}
        made["mask_bias"] = np.zeros((slots, columns), np.float32)
        made["totals"].fill(-np.inf)
        for name, buffer in old.items():
            _copy(buffer, made[name], size if name in per_token else size[:1])
        caches, memories = list[np.ndarray](), list[np.ndarray]()
        for block in self.model.decoder_blocks:
            heads, width = block.layers.heads, block.layers.head_width
            # 0, not empty: attention multiplies masked values by 0. The system clears pages when they are first used.
            caches += [np.zeros((slots, beams, capacity, heads * width), np.float32) for _ in range(2)]
            memories += [np.zeros((slots, heads, columns, width), np.float32) for _ in range(2)]
        for before, after in zip(self._caches, caches, strict=False):
            _copy(before, after, size)
        for before, after in zip(self._memories, memories, strict=False):
            _copy(before, after, size[:1])
        self.slots, self.capacity, self.buffers = slots, capacity, made
        self._caches, self._memories = caches, memories
        self._point()

    @property
    def cache_bytes(self) -> int:
        """Size of the caches and memories of all blocks."""
        return sum(one.nbytes for one in (*self._caches, *self._memories))

    def _point(self) -> None:
        """The struct of the present buffers."""
        options = self.options
        self._tables = [(ctypes.c_void_p * len(some))(*map(_place, some)) for some in (self._caches, self._memories)]
        self._struct = SearchStruct(
            self.slots, options.beams, self.capacity, options.source_columns, options.num_results, options.threads,
            BOS, EOS, len(self._suppressed), options.power, _place(self._suppressed),
            *map(ctypes.addressof, self._tables),
            *(_place(self.buffers[name]) for name, *_ in SearchStruct._fields_[13:-1]),
            _place(self.interrupt),
        )  # fmt: skip
        self._address = ctypes.addressof(self._struct)

    def enter(self, tokens: np.ndarray, lengths: np.ndarray, slots: np.ndarray, max_lengths: np.ndarray) -> None:
        """Encodes sources (G S, of these lengths) and begins their searches in these slots. All are int64."""
        places = map(_place, (tokens, lengths, slots, max_lengths))
        if self._enter(self.model.address, self._address, *tokens.shape, *places):
            raise MemoryError("out of memory in an encoder")

    def advance(self, steps: int) -> list[int]:
        """At most this number of steps, fewer when a source ends; the slots of those that ended.

        There have to be as many free columns as steps.
        """
        ended = self._advance(self.model.address, self._address, steps)
        if ended < 0:
            raise MemoryError("out of memory in a decoding step")
        found: list[int] = self.buffers["ended"][:ended].tolist() if ended else []
        return found


def _place(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def _copy(before: np.ndarray, after: np.ndarray, size: Sequence[int]) -> None:
    """The first sources, and of them the first columns, where `size` has two numbers."""
    part: tuple[slice, ...] = (slice(size[0]),)
    if len(size) > 1:
        part += (slice(None), slice(size[1]))
    after[part] = before[part]
