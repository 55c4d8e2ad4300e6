"""Attribution of an output to the rows of its source: integrated gradients.

IG_i = x_i . mean over a of the gradient of log p at a x, with a from 0 to 1 (Sundararajan, Taly and Yan 2017). The
baseline is a source whose embeddings are all zero. The sum over all rows is log p of the source minus log p of the
baseline, up to the error of the mean over a finite number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transduce.contracts import Encoder, FrontEnd
from transduce.flow import BOS, Batch, Padded
from transduce.model import Transducer

STEPS = 32  # points between the baseline and the source


def integrated_gradients(
    network: Transducer, batch: Batch, ids: Sequence[int], steps: Sequence[float]
) -> np.ndarray | None:
    """T S: the share of each row of one source in the log-probability of each target token.

    `batch` has the source once for each step. None where the network has no gradients, as with weights in 8 bits.
    """
    scales = torch.tensor(steps, device=batch.device)
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), _scaled_inputs(network, scales) as inputs:
        scores = _token_scores(network, batch, ids)  # N T
        if not scores.requires_grad:
            return None
        found = []
        for position in range(len(ids)):
            gradients = torch.autograd.grad(scores[:, position].sum(), inputs, retain_graph=True, allow_unused=True)
            found.append(torch.cat([_row_shares(*pair, scales) for pair in zip(inputs, gradients, strict=True)]))
    return torch.stack(found).float().cpu().numpy() if found else np.zeros((0, 0), np.float32)


def midpoints(count: int = STEPS) -> list[float]:
    """The steps of a mean over the interval from 0 to 1."""
    return [(number + 0.5) / count for number in range(count)]


def _token_scores(network: Transducer, batch: Batch, ids: Sequence[int]) -> Tensor:
    """N T: the log-probability of each target token, given the source and the tokens before it."""
    read, wanted = (torch.tensor([row] * batch.size, device=batch.device) for row in ([BOS, *ids[:-1]], [*ids]))
    logits = network.advance(read, network.start(batch)).logits.float()
    return logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]


def _row_shares(inputs: Tensor, gradients: Tensor | None, scales: Tensor) -> Tensor:
    """S: the dot products of the embeddings of the source with the mean of their gradients."""
    if gradients is None:  # this source has no influence
        return torch.zeros_like(inputs[0, :, 0])
    embedded = inputs[-1] / scales[-1]
    return (embedded * gradients.mean(0)).sum(-1).detach()


@contextmanager
def _scaled_inputs(network: Transducer, scales: Tensor) -> Iterator[list[Tensor]]:
    """Inside, the embeddings of each row of a batch are multiplied by its scale, and collected as leaves (N S D)."""
    leaves: list[Tensor] = []

    def scale(_: Any, __: Any, output: Any) -> Any:
        values = output.values if isinstance(output, Padded) else output
        leaf = (values.detach() * scales[:, None, None]).requires_grad_()
        leaves.append(leaf)
        return Padded(leaf, output.mask) if isinstance(output, Padded) else leaf

    handles = [front_end.register_forward_hook(scale) for front_end in front_ends(network)]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def front_ends(network: Transducer) -> list[FrontEnd]:
    """The front ends of the encoders of a network, in the order of the sources."""
    encoders = [part for part in network.modules() if isinstance(part, Encoder)]
    return list(dict.fromkeys(part.embedding for part in encoders if hasattr(part, "embedding")))
