"""A batch in, a step, labels or vectors out: the three shapes a model can have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from transduce.contracts import Decoder, Encoder, Head, TopKDecoder, TopKRequest
from transduce.decoding.ctc_prefix import advance_paths, begin_paths, read_paths
from transduce.errors import InputError
from transduce.flow import EOS, SPECIALS, Attention, Batch, Memory, Padded, State, Step, TopK
from transduce.heads import pool

NEVER = -1e4  # a logit as good as minus infinity, but finite: it may be smoothed and averaged


TopKStep = Callable[[Tensor, State, TopKRequest], TopK]


class Transducer(nn.Module, ABC):
    """Anything that speaks tokens: what training, search and scoring drive."""

    capturable: bool = False  # True: `start` follows from the shapes of a batch alone, so it can be recorded

    @property
    def supports_packing(self) -> bool:
        """Whether it learns from packed batches."""
        return False

    @property
    def constant_state(self) -> bool:
        """Whether its state can go on over any length of text: see `contracts.Decoder`."""
        return False

    @abstractmethod
    def start(self, batch: Batch) -> State:
        """Reads the sources of a batch."""

    @abstractmethod
    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        """Reads `tokens` (R T) after `state`: see `contracts.Decoder.advance`."""

    @property
    def top_k(self) -> TopKStep | None:
        """The step that finds the top k next tokens without storing all logits, of a `TopKDecoder`; else None."""
        return None

    def reserve(self, state: State, more: int, beams: int) -> State:
        """Room for a search: see `contracts.Decoder.reserve`."""
        return state

    def embed(self, texts: Padded, others: Mapping[str, Padded] | None = None) -> Tensor:
        """Rows `x1 .. xm </s>` (B S), and other sources beside them -> B D: the mean of what the encoder remembers."""
        if not isinstance(encoder := getattr(self, "encoder", None), Encoder):
            raise InputError("a decoder alone has no encoder to embed with", remedy="train with --task embed")
        memory = encoder(Batch(texts, extra=others or {}))
        return pool(memory.values, memory.mask, "mean")

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Step:
        """Teacher forcing: `advance` over all target tokens."""
        return self.advance(batch.decoder_inputs.values, self.start(batch), with_attention=with_attention)


class DecoderModel(Transducer):
    """A shape with a decoder, which does the speaking."""

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


class EncoderDecoder(DecoderModel):
    """p(y | x): the decoder reads the encoder's memory"""

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
    """p(y), or p(y | x) with the source as the beginning of one stream: x </s> <s> y </s>"""

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
    """labels from an encoder alone: one for the whole source, or one for each of its words

    The labels are spoken like any target, one after the other and then </s>, but each without looking at the ones
    before. So training, search, scores and evaluation need to know nothing of heads.
    """

    starts: Tensor

    def __init__(self, encoder: Encoder, head: Head, starts: Tensor) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.register_buffer("starts", starts, persistent=False)  # V of the source: which ids begin a word

    def start(self, batch: Batch) -> State:
        assert batch.source is not None, "an encoder alone reads the source of a batch"
        memory = self.encoder(batch)
        logits = self.head(memory.values, memory.mask)
        if logits.dim() == 2:  # one label: B V -> B 1 V
            logits = logits[:, None]
            count = logits.new_ones(logits.size(0), dtype=torch.long)
        else:  # the rows where words begin, moved to the front
            begins = self.starts[batch.source.values] & batch.source.mask
            count = begins.sum(1)
            order = begins.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices  # as wide as the source
            logits = logits.gather(1, order[..., None].expand(-1, -1, logits.size(-1)))  # B S V
        silent = logits.new_zeros(logits.size(-1), dtype=torch.bool)
        silent[: len(SPECIALS)] = True
        logits = logits.masked_fill(silent, NEVER)
        return State({"logits": logits, "count": count}, {"place": torch.zeros_like(count)})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        logits, count = state.fixed["logits"], state.fixed["count"].repeat_interleave(state.beams, 0)
        place = state.past["place"]
        steps = place[:, None] + torch.arange(tokens.size(1), device=tokens.device)  # R T
        rows = torch.arange(len(place), device=tokens.device)[:, None] // state.beams
        said = logits[rows, steps.clamp(max=logits.size(1) - 1)]  # R T V
        closed = torch.full_like(said, NEVER)
        closed[..., EOS] = 0.0
        said = torch.where((steps >= count[:, None])[..., None], closed, said)
        read = tokens.size(1) if mask is None else mask.sum(1)
        attention = Attention() if with_attention else None
        return Step(said, replace(state, past={"place": place + read}), attention)


class CTCModel(Transducer):
    """texts from an encoder alone, as long as its rows make them: p(y | x) is the sum over all paths that spell y

    Spoken token by token like any target, each after the ones before (layers/paths.py), so search and scores are
    those of every model, and exact. A batch without a target gives the state alone: all that a sum over paths needs.
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
    """The two sides of the pairs of a batch, each as one vector a row."""

    source: Tensor  # B D
    target: Tensor  # B D


class EmbeddingModel(Transducer):
    """one vector for a text, from an encoder alone: what training, search and maps compare

    Both sides of a pair go through the same encoder. It speaks no tokens, and says so where it is asked to.
    """

    def __init__(self, encoder: Encoder, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def embed(self, texts: Padded, others: Mapping[str, Padded] | None = None) -> Tensor:
        """Rows `x1 .. xm </s>` (B S) -> B D."""
        memory = self.encoder(Batch(texts, extra=others or {}))
        vectors: Tensor = self.head(memory.values, memory.mask)
        return vectors

    def forward(self, batch: Batch, *, with_attention: bool = False) -> PairEmbeddings:  # type: ignore[override]
        """The vectors of a batch of pairs, in place of the step that a model with words would give."""
        assert batch.source is not None, "an encoder alone reads the source of a batch"
        # A target row without its <s> looks as a source row does.
        return PairEmbeddings(self.embed(batch.source), self.embed(batch.labels))

    def start(self, batch: Batch) -> State:
        raise no_decoder_error()

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        raise no_decoder_error()


def no_decoder_error() -> InputError:
    """What is told to whoever asks a model of vectors for tokens."""
    return InputError(
        "this model gives vectors, not text",
        remedy="use `transduce embed`, `transduce search` or `transduce cluster`; in Python model.embed([...])",
    )
