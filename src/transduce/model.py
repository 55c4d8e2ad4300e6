"""A batch in, a step or labels out: the three shapes a model can have."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from transduce.contracts import Decoder, Encoder, Head
from transduce.flow import Batch, Memory, State, Step


class Transducer(nn.Module, ABC):
    """Anything that speaks tokens: what training, search and scoring drive."""

    decoder: Decoder

    @abstractmethod
    def start(self, batch: Batch) -> State:
        """Reads the sources of a batch."""

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.decoder.advance(tokens, state, mask, with_attention=with_attention)

    def forward(self, batch: Batch, *, with_attention: bool = False) -> Step:
        """Teacher forcing: `advance` over all target tokens."""
        return self.advance(batch.inputs.values, self.start(batch), with_attention=with_attention)


class EncoderDecoder(Transducer):
    """p(y | x): the decoder reads the encoder's memory"""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def start(self, batch: Batch) -> State:
        return self.decoder.start(self.encoder(batch))


class DecoderOnly(Transducer):
    """p(y), or p(y | x) with the source as the beginning of one stream: x </s> <s> y </s>"""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def start(self, batch: Batch) -> State:
        state = self.decoder.start(Memory.empty(batch.size, batch.device))
        if batch.source is None:
            return state
        return self.decoder.advance(batch.source.values, state, batch.source.mask).state


class EncoderOnly(nn.Module):
    """labels from an encoder alone"""

    def __init__(self, encoder: Encoder, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, batch: Batch) -> Tensor:
        memory = self.encoder(batch)
        logits: Tensor = self.head(memory.values, memory.mask)
        return logits
