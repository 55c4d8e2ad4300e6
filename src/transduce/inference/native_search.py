"""Open searches of the native library: greedy and beam search of lowered Transformers on a CPU, many steps a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.attention.positions import Learned, NoPosition, Sinusoidal
from transduce.contracts import LogitsProcessor, Strategy
from transduce.decoding.continuous_batching import GROUPS_PER_SEARCH, SearchShape
from transduce.decoding.search import Stepper, common_tokens
from transduce.decoding.strategies import Beam, Greedy
from transduce.encoders.transformer import TransformerEncoder
from transduce.flow import EOS, PAD, Hypothesis
from transduce.inference.decoder_program import JointCrossAttention, LoweredDecoder, has_embedding_tables
from transduce.inference.lowering import MAX_POSITIONS, NativeBackend, NativeEncoderBlock, position_table
from transduce.kernels.native.beam_search import (
    BeamSearchOptions,
    EntryLayers,
    NativeBeamSearch,
    NativeEncoderDecoder,
)
from transduce.kernels.native.inference import MAX_K, NativeLinear, NormParameters
from transduce.layers.embedding import Embedding
from transduce.layers.norm import LayerNorm
from transduce.layers.transformer import TransformerStack
from transduce.model import EncoderDecoder, Transducer

FIRST_SLOTS, FIRST_CAPACITY = 8, 64  # of a search; both double
KEPT_BYTES = 1 << 25  # of caches, which a search without sources keeps
STEPS = 16  # of a call, where no source ends and nobody waits


def native_encoder_decoder(network: Transducer) -> NativeEncoderDecoder | None:
    """The network for native searches; None: a part of it is none of the native library."""
    if type(network) is not EncoderDecoder:
        return None
    encoder, decoder = network.encoder, network.decoder
    if not isinstance(decoder, LoweredDecoder) or type(encoder) is not TransformerEncoder:
        return None
    backend = decoder.backend
    native = isinstance(backend, NativeBackend) and backend.finds_top_k and has_embedding_tables(decoder)
    if not native or decoder.window is not None or not _encodes_natively(encoder):
        return None
    cross = [layer.cross_attention for layer in decoder.layers]
    memory_layers: list[NativeLinear | None] = [
        getattr(one.kv_proj, "native", None) if isinstance(one, JointCrossAttention) else None for one in cross
    ]
    norms = (encoder.embedding_norm, encoder.final_norm, decoder.embedding_norm)
    if None in memory_layers or not all(norm is None or type(norm) is LayerNorm for norm in norms):
        return None
    assert isinstance(backend, NativeBackend)
    blocks = [layer.native for layer in encoder.layers if isinstance(layer, NativeEncoderBlock)]
    output: Any = decoder.output.projection
    return NativeEncoderDecoder(
        (_entry(encoder), _entry(decoder)),
        (blocks, _norm(encoder.final_norm)),
        memory_layers,  # type: ignore[arg-type]
        backend.decoder,
        output.native,
    )


def _encodes_natively(encoder: TransformerEncoder) -> bool:
    position, embedding = encoder.position, encoder.embedding
    tables = type(position) in (Learned, NoPosition, Sinusoidal) and getattr(position, "concat_proj", None) is None
    tables = tables and type(embedding) is Embedding and embedding.source_eos and encoder.embedding_proj is None
    return tables and not encoder.causal and all(type(layer) is NativeEncoderBlock for layer in encoder.layers)


def _entry(stack: TransformerStack) -> EntryLayers:
    embedding: Any = stack.embedding
    return EntryLayers(
        embedding.weight, embedding.scale, position_table(stack, embedding.weight), _norm(stack.embedding_norm)
    )


def _norm(norm: nn.Module | None) -> NormParameters | None:
    return None if norm is None else (norm.weight, norm.bias, norm.eps)  # type: ignore[return-value]


class NativeSearch:
    """A search without end over native calls, as `OpenSearch` is over modules. Its sources are texts, without a prefix.

    Slots and caches grow with the sources. A call takes several steps: it ends early when a source ends, and with its
    present step when `interrupt` is set.
    """

    def __init__(
        self,
        model: NativeEncoderDecoder,
        stepper: Stepper,
        shape: SearchShape,
        *,
        nbest: int | None,
        interrupt: np.ndarray,
    ) -> None:
        suppressed, power = stepper.suppressed(None), stepper.length_power
        assert suppressed is not None
        assert power is not None
        width = stepper.strategy.width
        options = BeamSearchOptions(
            width, stepper.num_results, power, suppressed, shape.source_columns, torch.get_num_threads()
        )
        self._search = NativeBeamSearch(model, options, interrupt)
        self.shape, self.nbest = shape, width if nbest is None else min(nbest, width)
        self.slots: dict[int, int] = {}  # by number of the source
        self._numbers: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._longest = 0  # tokens that no history exceeds
        self._results: dict[int, list[Hypothesis]] = {}  # of sources that have left

    @classmethod
    def open(
        cls,
        model: NativeEncoderDecoder | None,
        network: Transducer,
        strategy: Strategy,
        shape: SearchShape,
        *,
        processors: Sequence[LogitsProcessor],
        nbest: int | None,
        interrupt: np.ndarray,
    ) -> NativeSearch | None:
        """A search with these options; None: the native library has none of them."""
        known = isinstance(strategy, Beam | Greedy) and strategy.candidates == strategy.width <= MAX_K
        fits = shape.source_columns <= MAX_POSITIONS and shape.max_length < MAX_POSITIONS
        if model is None or not known or not fits or shape.prefix_columns or not shape.source_columns:
            return None
        stepper = Stepper(
            network, strategy, processors, max_length=shape.max_length, nbest=nbest, prefixed=False, capturable=False
        )
        if stepper.length_power is None or stepper.suppressed(None) is None or stepper.suppressed(0) is None:
            return None
        if set(stepper.suppressed(0) or ()) != set(stepper.suppressed(None) or ()):
            return None
        return cls(model, stepper, shape, nbest=nbest, interrupt=interrupt)

    @property
    def active(self) -> int:
        """Sources in the search."""
        return len(self.slots)

    @property
    def free(self) -> int:
        """Sources that may enter together now."""
        return self.shape.slots - len(self.slots)

    def add(self, sources: Sequence[Sequence[int]], max_lengths: Sequence[int], numbers: Sequence[int]) -> None:
        """Begins these sources: their tokens without </s>, the maximal lengths of their outputs, their numbers."""
        self._make_room(len(numbers))
        lengths = [len(one) + 1 for one in sources]
        tokens = np.full((len(sources), max(lengths)), PAD, np.int64)
        for row, source in zip(tokens, sources, strict=True):
            row[: len(source)], row[len(source)] = source, EOS
        slots = [self._free.pop() for _ in numbers]
        try:
            self._search.enter(tokens, *(np.array(some, np.int64) for some in (lengths, slots, max_lengths)))
        except MemoryError:
            self._free += slots
            raise
        self.slots.update(zip(numbers, slots, strict=True))
        self._numbers.update(zip(slots, numbers, strict=True))

    def _make_room(self, entering: int) -> None:
        before, needed = self._search.slots, len(self.slots) + entering
        if needed > before:
            size = min(max(needed, 2 * before, FIRST_SLOTS), self.shape.slots)
            self._search.resize(size, max(self._search.capacity, FIRST_CAPACITY))
            self._free += range(size - 1, before - 1, -1)

    def advance(self, steps: int = STEPS) -> list[int]:
        """Steps until a source ends; those that ended leave the search. `take_results` has their hypotheses."""
        if not self.slots:
            return []
        search = self._search
        if self._longest + steps > search.capacity:
            lengths = search.buffers["lengths"]
            self._longest = int(lengths[list(self._numbers)].max())
            if self._longest + 1 > search.capacity:
                search.resize(search.slots, 2 * search.capacity)
            steps = min(steps, search.capacity - self._longest)
        self._longest += steps
        ended = {self._numbers[slot]: self._hypotheses(slot) for slot in search.advance(steps)}
        self._results |= ended
        self._release(list(ended))
        return list(ended)

    def take_results(self) -> dict[int, list[Hypothesis]]:
        """The hypotheses of the sources that have left. They are given once."""
        results, self._results = self._results, {}
        return results

    def search_all(self, sources: Sequence[Sequence[int]], max_lengths: Sequence[int]) -> list[list[Hypothesis]]:
        """Hypotheses of each source, in order. A group of sources enters when as many slots are free."""
        group, found, entered = -(-self.shape.slots // GROUPS_PER_SEARCH), dict[int, list[Hypothesis]](), 0
        while len(found) < len(sources):
            if entered < len(sources) and (self.free >= group or not self.active):
                rows = range(entered, min(entered + self.free, len(sources)))
                self.add([sources[row] for row in rows], [max_lengths[row] for row in rows], rows)
                entered = rows.stop
            self.advance()
            found |= self.take_results()
        return [found[row] for row in range(len(sources))]

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        buffers, found = self._search.buffers, list[Hypothesis]()
        for row in range(self.nbest):
            length, rank = int(buffers["finished_lengths"][slot, row]), float(buffers["finished_ranks"][slot, row])
            if rank > -np.inf:
                ids, scores = (
                    buffers[name][slot, row, :length].tolist() for name in ("finished_ids", "finished_scores")
                )
                found.append(Hypothesis(tuple(ids), tuple(scores), rank, bool(buffers["complete"][slot, row])))
        return found

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            slot = self.slots.pop(number)
            del self._numbers[slot]
            self._free.append(slot)
        if not self.slots:
            self._longest = 0
            if self._search.capacity > FIRST_CAPACITY or self._search.cache_bytes > KEPT_BYTES:
                # The next sources begin with small caches.
                self._search.resize(0, 0)
                self._free = []

    def cancel(self, numbers: Sequence[int]) -> None:
        """Removes these sources; their slots are free at once."""
        held = [number for number in numbers if number in self.slots]
        for number in held:
            self._search.buffers["totals"][self.slots[number]] = -np.inf
        self._release(held)

    def certain(self, number: int) -> list[tuple[int, float]]:
        """The tokens, with scores, that the output of a source begins with whatever follows."""
        if number not in self.slots:
            return []
        slot, buffers, rows = self.slots[number], self._search.buffers, list[tuple[list[int], list[float]]]()
        length = int(buffers["lengths"][slot])
        for row in (buffers["totals"][slot] > -np.inf).nonzero()[0]:
            rows.append((buffers["history"][slot, row, :length].tolist(), buffers["token_scores"][slot, row].tolist()))
        for row in (buffers["finished_ranks"][slot] > -np.inf).nonzero()[0]:
            ids = buffers["finished_ids"][slot, row, : buffers["finished_lengths"][slot, row]]
            rows.append((ids.tolist(), buffers["finished_scores"][slot, row].tolist()))
        return common_tokens(rows)
