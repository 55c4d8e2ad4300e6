"""A model that names every token of its source in; one that is asked only for the masked ones out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transduce.flow import UNK, Batch, State, Step
from transduce.model import NEVER, EncoderOnly, Transducer


class Filling(Transducer):
    """What the source shows is given: it is said again, for certain. So the score of a path is that of its fillings."""

    def __init__(self, inner: EncoderOnly) -> None:
        super().__init__()
        self.inner = inner

    def start(self, batch: Batch) -> State:
        assert batch.source is not None
        state = self.inner.start(batch)
        logits = state.fixed["logits"]  # B S V, one place for each token before </s>
        shown = batch.source.values[:, : logits.size(1)]  # B S
        given = torch.full_like(logits, NEVER).scatter(-1, shown[..., None], 0.0)
        logits = torch.where((shown != UNK)[..., None], given, logits)
        return replace(state, fixed={**state.fixed, "logits": logits})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.inner.advance(tokens, state, mask, with_attention=with_attention)
