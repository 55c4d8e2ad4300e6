"""Token embedding and output projection."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from transduce.contracts import FrontEnd
from transduce.flow import PAD, Padded
from transduce.kernels.linear import output_projection
from transduce.layers.feed_forward import ACTIVATIONS, Activation, dense

EPSILON = 1e-5  # the default of a norm


class Embedding(nn.Embedding, FrontEnd):
    """One vector per token, scaled by sqrt(D). The weights have deviation D ** -0.5, as a tied output needs it."""

    source_eos: bool = True  # False: the final </s> of a source is masked

    def __init__(self, size: int, width: int, *, scale_embedding: bool = True) -> None:
        super().__init__(size, width, padding_idx=PAD)
        self.size, self.width, self.scale = size, width, math.sqrt(width) if scale_embedding else 1.0
        nn.init.normal_(self.weight, std=width**-0.5)
        nn.init.zeros_(self.weight[PAD].detach())

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale  # ... D

    def rows(self, source: Padded) -> Padded:
        mask = source.mask
        if not self.source_eos:  # not of an empty source: every row needs a real token
            lengths = (mask.sum(1, keepdim=True) - 1).clamp(min=1)
            mask = mask & (torch.arange(mask.size(1), device=mask.device) < lengths)
        return Padded(self(source.values), mask)


def output_transform(
    width: int, norm_eps: float | None = None, *, output_width: int | None = None, activation: Activation = "gelu"
) -> list[nn.Module]:
    """The transform before the output projection of a masked language model: LayerNorm(f(W x + b)) (Devlin 2019)."""
    output_width = output_width or width
    return [dense(width, output_width), ACTIVATIONS[activation](), nn.LayerNorm(output_width, norm_eps or EPSILON)]


class Output(nn.Module):
    """Logits W x + b; W may be the weight of an embedding (Press & Wolf 2017).

    `deep` comes first: see `output_transform`. So does a linear layer to the width of a tied embedding. Capped logits
    are c tanh((W x + b) / c) (Gemma Team 2024).
    """

    def __init__(
        self,
        width: int,
        size: int,
        tied: Embedding | None = None,
        deep: Sequence[nn.Module] = (),
        *,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.cap = cap
        if tied is not None and tied.width != width:  # narrower embeddings are an output of a linear layer
            deep, width = [*deep, dense(width, tied.width)], tied.width
        self.transform = nn.Sequential(*deep) if deep else None
        self.projection = nn.Linear(width, size)
        nn.init.normal_(self.projection.weight, std=width**-0.5)
        nn.init.zeros_(self.projection.bias)
        if tied is not None:
            self.projection.weight = tied.weight

    @property
    def is_linear(self) -> bool:
        """Whether logits are W x + b and no more."""
        return self.transform is None and self.cap is None

    def forward(self, values: Tensor) -> Tensor:
        values = values if self.transform is None else self.transform(values)
        logits = output_projection(self.projection, values)  # ... V
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
