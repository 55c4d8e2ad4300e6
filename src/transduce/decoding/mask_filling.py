"""Mask filling with a masked language model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transduce.flow import UNK, Batch, State, Step
from transduce.model import NEVER, EncoderOnly, Transducer


class MaskFilling(Transducer):
    """Predicts the masked tokens of a source and copies the others with probability 1: only the former are scored."""

    def __init__(self, inner: EncoderOnly) -> None:
        super().__init__()
        self.inner = inner

    def start(self, batch: Batch) -> State:
        assert batch.source is not None
        state = self.inner.start(batch)
        logits = state.fixed["logits"]  # B S V: one position for each token before </s>
        source = batch.source.values[:, : logits.size(1)]  # B S
        copied = torch.full_like(logits, NEVER).scatter(-1, source[..., None], 0.0)
        logits = torch.where((source != UNK)[..., None], copied, logits)
        return replace(state, fixed={**state.fixed, "logits": logits})

    def advance(
        self, tokens: Tensor, state: State, mask: Tensor | None = None, *, with_attention: bool = False
    ) -> Step:
        return self.inner.advance(tokens, state, mask, with_attention=with_attention)
