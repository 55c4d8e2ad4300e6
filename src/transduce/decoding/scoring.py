"""Decoding without search: scoring of given targets, mask filling."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transduce.flow import UNK, Batch, State, Step
from transduce.model import NEVER, EncoderOnly, Transducer


@torch.inference_mode()
def score(model: Transducer, batch: Batch) -> list[tuple[float, ...]]:
    """log p(y_t | y_<t, x) for each target token, </s> included; their sum is the score of a hypothesis."""
    gold = batch.labels
    logs = model(batch).logits.float().log_softmax(-1)
    chosen = logs.gather(-1, gold.values[..., None]).squeeze(-1)  # B T
    return [tuple(row[real].tolist()) for row, real in zip(chosen, gold.mask, strict=True)]


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
