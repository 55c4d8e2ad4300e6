"""Layer, RMS, batch and instance norm, and the residual connection: pre-norm, post-norm, both, parallel sub-layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from transduce.kernels.add_norm import NormPair, ResidualStream, add_norm, add_residual, norm_stream, row_norm

Normalisation = Literal["layer", "rms", "batch"]


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / deviation(x) * g + b, over the features of a row (Ba 2016)"""

    def __init__(self, width: int, bias: bool = True, *, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps, bias=bias)

    def forward(self, values: Tensor, real: Tensor | None = None) -> Tensor:
        return row_norm(self, values)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2)) * g, over the features of a row (Zhang & Sennrich 2019)"""

    def __init__(self, width: int, bias: bool = True, *, eps: float = 1e-6) -> None:
        super().__init__(width, eps=eps)  # it never has a bias

    def forward(self, values: Tensor, real: Tensor | None = None) -> Tensor:
        return row_norm(self, values)


class BatchNorm(nn.Module):
    """each feature by its mean and deviation over the unpadded rows of a batch (Ioffe & Szegedy 2015)

    In training a row depends on its batch, so micro-batches and processes no longer add up to one batch; running
    means take the batch's place at evaluation, where every law holds again. They fit what was trained only where
    batches are alike. Sorted batches are not: set `training.bucket_batches: 1` (reversing letters: 41 % right
    with sorted batches, 100 % without).
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, bias: bool = True, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, values: Tensor, real: Tensor | None = None) -> Tensor:
        mean, variance = self._measure(values, real) if self.training else (self.mean, self.variance)
        scaled = (values.float() - mean) * torch.rsqrt(variance + self.eps) * self.weight
        return (scaled if self.bias is None else scaled + self.bias).to(values.dtype)

    def _measure(self, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of the unpadded rows; updates the running statistics."""
        values = values.float()  # R T D; sums over a batch need the precision
        weights = torch.ones_like(values[..., :1]) if real is None else real[..., None].to(values)
        count = weights.sum()
        mean = (values * weights).sum((0, 1)) / count
        variance = ((values - mean).square() * weights).sum((0, 1)) / count
        with torch.no_grad():
            unbiased = variance * count / (count - 1).clamp(min=1)
            for running, now in ((self.mean, mean), (self.variance, unbiased)):
                # Training skips a non-finite batch, which must not stay in the running statistics.
                running.lerp_(torch.where(torch.isfinite(now), now, running), self.momentum)
        return mean, variance


class InstanceNorm(nn.Module):
    """each feature by its mean and deviation over the unpadded rows of its own sequence (Ulyanov 2016)

    Equal to group norm with one group per feature, of a sequence without padding. `joint`: one mean and deviation for
    all features, as with one group.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, joint: bool = False) -> None:
        super().__init__()
        self.eps, self.joint = eps, joint
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor, real: Tensor) -> Tensor:
        weights = real[..., None].float()  # R T 1
        count = weights.sum(1, keepdim=True).clamp(min=1)
        mean = self._joined((values.float() * weights).sum(1, keepdim=True) / count)
        variance = self._joined(((values.float() - mean).square() * weights).sum(1, keepdim=True) / count)
        scaled = (values.float() - mean) * torch.rsqrt(variance + self.eps)
        return (scaled * self.weight + self.bias).to(values.dtype)

    def _joined(self, statistics: Tensor) -> Tensor:
        return statistics.mean(-1, keepdim=True) if self.joint else statistics  # R 1 . of R 1 D


class NoNorm(nn.Module):
    """Rows as they are, in the place of a norm"""

    def forward(self, values: Tensor, real: Tensor | None = None) -> Tensor:
        return values


NORMALISATIONS: dict[str, Callable[..., nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "batch": BatchNorm,
}


NormPlacement = Literal["pre", "post", "parallel", "sandwich"]


def make_norm(kind: Normalisation, width: int, bias: bool = True, eps: float | None = None) -> nn.Module:
    return NORMALISATIONS[kind](width, bias, **({} if eps is None else {"eps": eps}))


class Residual(NamedTuple):
    """pre: x + f(norm(x)) (Xiong 2020); post: norm(x + f(x)) (Vaswani 2017)

    parallel: x + f(norm_1(x)) + g(norm_2(x)) (Wang & Komatsuzaki 2021), one sum for the sub-layers of a layer.
    sandwich: x + norm_2(f(norm_1(x))) (Ding 2021).
    """

    norm: nn.Module
    placement: NormPlacement
    dropout: nn.Dropout
    output_norm: nn.Module | None = None  # norm_2 of a sandwich

    def enter(self, values: ResidualStream, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual, and the input of the layer."""
        if isinstance(values, NormPair):
            return values
        if self.placement != "post":
            return norm_stream(self.norm, values, real)
        assert isinstance(values, Tensor)
        return values, values

    def leave(self, values: Tensor, change: Tensor, real: Tensor | None) -> ResidualStream:
        """The residual stream after the layer, whose output is `change`."""
        change = change if self.output_norm is None else self.output_norm(change, real)
        if self.placement != "post":
            return add_residual(values, change, self.dropout)
        return add_norm(self.norm, values, change, self.dropout, real)
