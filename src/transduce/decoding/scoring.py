"""Scoring of given targets: the log-probability of every token."""

from __future__ import annotations

import torch

from transduce.flow import Batch
from transduce.model import Transducer


@torch.inference_mode()
def score(model: Transducer, batch: Batch) -> list[tuple[float, ...]]:
    """log p(y_t | y_<t, x) for each target token, </s> included; their sum is the score of a hypothesis."""
    gold = batch.labels
    logs = model(batch).logits.float().log_softmax(-1)
    chosen = logs.gather(-1, gold.values[..., None]).squeeze(-1)  # B T
    return [tuple(row[real].tolist()) for row, real in zip(chosen, gold.mask, strict=True)]
