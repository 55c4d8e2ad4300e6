"""Model shapes: encoder-decoder, decoder-only, encoder-only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from transduce.contracts import Decoder, Encoder, Head
from transduce.decoders.ctc import advance_paths, begin_paths, read_paths
from transduce.errors import InputError
from transduce.flow import EOS, SPECIALS, Attention, Batch, Memory, Padded, State, Step, TopK, TopKRequest
from transduce.heads import pool

NEVER = -1e4  # a finite substitute for minus infinity, which label smoothing and averaging allow


TopKStep = Callable[[Tensor, State, TopKRequest], TopK]


@runtime_checkable
class TopKDecoder(Protocol):
    """A decoder that finds the top k next tokens without storing all logits: a lowered one (inference/lowering)."""

    @property
    def supports_shortlists(self) -> bool:
        """Whether a request may have shortlists."""

    def top_k(self, tokens: Tensor, state: State, request: TopKRequest) -> TopK:
        """As `Decoder.advance` over one token per row (R 1), after `reserve`."""


class Transducer(nn.Module, ABC):
    """Base of all models: what training, search and scoring call."""

    capturable: bool = False  # True: `start` depends on shapes alone, so a CUDA graph can capture it

    @property
    def supports_packing(self) -> bool:
        """Whether it can be trained on packed batches."""
        return False

    @property
    def constant_state(self) -> bool:
        """Whether its state has a constant size: see `contracts.Decoder`."""
        return False

    @abstractmethod
    def start(self, batch: Batch) -> State:
        """The state after encoding the sources of a batch."""

    @abstractmethod
    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        """Processes `tokens` (R T) after `state`: see `contracts.Decoder.advance`."""

    @property
    def top_k(self) -> TopKStep | None:
        """The step that finds the top k next tokens without storing all logits, of a `TopKDecoder`; else None."""
        return None

    def reserve(self, state: State, more: int, beams: int) -> State:
        """Preallocated caches for a search: see `contracts.Decoder.reserve`."""
        return state

    def memory_mask(self, state: State) -> Tensor | None:
        """B S: the memory rows of cross-attention, None without: see `contracts.Decoder.memory_mask`."""
        return None

    def embed(self, texts: Padded, others: Mapping[str, Padded] | None = None) -> Tensor:
        """Rows `x1 .. xm </s>` (B S), and further sources -> B D: the mean of the encoder output."""
        if not isinstance(encoder := getattr(self, "encoder", None), Encoder):
            raise InputError("a decoder-only model has no encoder to embed with", remedy="train with --task embed")
        memory = encoder(Batch(texts, extra=others or {}))
        return pool(memory.values, memory.mask, "mean")

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Step:
        """Teacher forcing: `advance` over all target tokens."""
        return self.advance(batch.decoder_inputs.values, self.start(batch), with_attention=with_attention)


class DecoderModel(Transducer):
    """Base of models with a decoder."""

    decoder: Decoder

    @property
    def constant_state(self) -> bool:
        return self.decoder.constant_state

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.decoder.advance(tokens, state, mask, with_attention=with_attention)

    @property
    def top_k(self) -> TopKStep | None:
        return self.decoder.top_k if isinstance(self.decoder, TopKDecoder) else None

    def reserve(self, state: State, more: int, beams: int) -> State:
        return self.decoder.reserve(state, more, beams)

    def memory_mask(self, state: State) -> Tensor | None:
        return self.decoder.memory_mask(state)


class EncoderDecoder(DecoderModel):
    """p(y | x): a decoder that attends to the memory of an encoder"""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.capturable = encoder.capturable

    @property
    def supports_packing(self) -> bool:
        return self.encoder.supports_packing and self.decoder.supports_packing

    def start(self, batch: Batch) -> State:
        return self.decoder.start(self.encoder(batch))

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Step:
        if batch.packed_labels is None:
            return super().forward(batch, with_attention=with_attention)
        read = batch.decoder_inputs
        assert read.layout is not None, "a packed batch tells whose each token is"
        return self.advance(read.values, self.decoder.pack(self.start(batch), read.layout))


class DecoderOnly(DecoderModel):
    """p(y), or p(y | x) with the source as the prefix of one sequence: x </s> <s> y </s>"""

    capturable = True

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def start(self, batch: Batch) -> State:
        state = self.decoder.start(Memory.empty(batch.size, batch.device))
        if batch.source is None:
            return state
        return self.decoder.advance(batch.source.values, state, batch.source.mask).state


class EncoderOnly(Transducer):
    """an encoder and a head: one label for the source, or one for each of its words

    The labels are generated like any target, one after the other and then </s>, each independent of the previous
    ones. So training, search, scoring and evaluation treat heads like decoders.
    """

    starts: Tensor

    def __init__(self, encoder: Encoder, head: Head, starts: Tensor, source_size: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.capturable = encoder.capturable
        self.source_size = source_size
        # Which source ids begin a word. More than the source has tokens: ids with word marks follow (see Tokenizer).
        self.register_buffer("starts", starts, persistent=False)

    def start(self, batch: Batch) -> State:
        assert batch.source is not None, "an encoder alone reads the source of a batch"
        read = batch
        if len(self.starts) > self.source_size:
            read = replace(batch, source=replace(batch.source, values=batch.source.values % self.source_size))
        memory = self.encoder(read)
        logits = self.head(memory.values, memory.mask)
        if logits.dim() == 2:  # one label: B V -> B 1 V
            logits = logits[:, None]
            count = logits.new_ones(logits.size(0), dtype=torch.long)
        else:  # rows at the beginning of a word are moved to the front
            begins = self.starts[batch.source.values] & batch.source.mask
            count = begins.sum(1)
            order = begins.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices  # as wide as the source
            logits = logits.gather(1, order[..., None].expand(-1, -1, logits.size(-1)))  # B S V
        specials = torch.arange(logits.size(-1), device=logits.device) < len(SPECIALS)
        # Relative to the mean: label smoothing would lower all logits without end towards a constant. So its share for
        # the special tokens, which are no labels, falls to the labels in equal parts.
        impossible = logits[..., len(SPECIALS) :].mean(-1, keepdim=True) + NEVER
        logits = torch.where(specials, impossible, logits)
        return State({"logits": logits, "count": count}, {"position": torch.zeros_like(count)})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        logits, count = state.fixed["logits"], state.fixed["count"].repeat_interleave(state.beams, 0)
        position = state.past["position"]
        steps = position[:, None] + torch.arange(tokens.size(1), device=tokens.device)  # R T
        rows = torch.arange(len(position), device=tokens.device)[:, None] // state.beams
        selected = logits[rows, steps.clamp(max=logits.size(1) - 1)]  # R T V
        is_eos = torch.arange(selected.size(-1), device=tokens.device) == EOS
        end = torch.zeros_like(selected).masked_fill(~is_eos, NEVER)
        selected = torch.where((steps >= count[:, None])[..., None], end, selected)
        read = tokens.size(1) if mask is None else mask.sum(1)
        attention = Attention() if with_attention else None
        return Step(selected, replace(state, past={"position": position + read}), attention)


class CTCModel(Transducer):
    """CTC: p(y | x) is the sum over all alignment paths that collapse to y (Graves 2006)

    Generated token by token, each given the previous ones (decoders/ctc.py), so search and scores are those of
    every model, and exact. A batch without a target gives the state alone, which suffices for the sum over paths.
    """

    def __init__(self, encoder: Encoder, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.capturable = encoder.capturable

    def start(self, batch: Batch) -> State:
        memory = self.encoder(batch)
        fixed = read_paths(self.head(memory.values, memory.mask), memory.mask)
        return State(fixed, begin_paths(fixed))

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        past, logits = advance_paths(state.fixed, state.past, tokens, mask)
        return Step(logits, replace(state, past=past), Attention() if with_attention else None)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Step:
        if batch.target is not None:
            return super().forward(batch, with_attention=with_attention)
        state = self.start(batch)
        return Step(state.fixed["paths"][:, :0], state)


@dataclass(frozen=True)
class PairEmbeddings:
    """Embeddings of the sources and targets of a batch of pairs."""

    source: Tensor  # B D
    target: Tensor  # B D


class EmbeddingModel(Transducer):
    """an encoder and a head that give one vector per text

    Both sides of a pair go through the same encoder, or the targets through one of their own with its own head, so that
    the sides may be of different modalities (Radford 2021). It generates no tokens.
    """

    def __init__(self, encoder: Encoder, head: Head, target: tuple[Encoder, Head] | None = None) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        if target is not None:
            self.target_encoder, self.target_head = target

    @property
    def has_target_encoder(self) -> bool:
        return hasattr(self, "target_encoder")

    def embed(self, texts: Padded, others: Mapping[str, Padded] | None = None) -> Tensor:
        """Rows `x1 .. xm </s>` (B S) -> B D."""
        memory = self.encoder(Batch(texts, extra=others or {}))
        vectors: Tensor = self.head(memory.values, memory.mask)
        return vectors

    def forward(self, batch: Batch, *, with_attention: bool = False) -> PairEmbeddings:  # type: ignore[override]
        """The embeddings of a batch of pairs, instead of a Step."""
        assert batch.source is not None, "an encoder alone reads the source of a batch"
        # A target row without its <s> has the form of a source row.
        return PairEmbeddings(self.embed(batch.source, batch.extra), self.embed_targets(batch.labels))

    def embed_targets(self, texts: Padded) -> Tensor:
        """The vectors of targets, rows `y1 .. yn </s>` (B T) -> B D."""
        if not self.has_target_encoder:
            return self.embed(texts)
        memory = self.target_encoder(Batch(texts))
        vectors: Tensor = self.target_head(memory.values, memory.mask)
        return vectors

    def start(self, batch: Batch) -> State:
        raise no_decoder_error()

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        raise no_decoder_error()


def no_decoder_error() -> InputError:
    """The error of models without a decoder."""
    return InputError(
        "this model gives vectors, not text",
        remedy="use `transduce embed`, `transduce search` or `transduce cluster`; in Python model.embed([...])",
    )
