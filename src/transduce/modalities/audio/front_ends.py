"""Frames in, rows of vectors out: fewer of them, by convolutions that stride, or each frame by itself."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, FrontEnd
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.kernels.linear import ACTIVATIONS
from transduce.layers.feed_forward import dense

KERNEL = 3


class ConvSubsampling(FrontEnd):
    """f(conv f(conv x)): convolutions over three frames each, which leave out every other one

    A row stands where the middle of its window stood, so it is real where that was. Padding is zero before every layer,
    like what lies beyond the end: it cannot leak into real rows.
    """

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        strides: tuple[Count, ...] = (2, 2),
        activation: Literal["relu", "gelu", "silu"] = "relu",
    ) -> None:
        super().__init__()
        self.width, self.strides, self.activation = width, strides, ACTIVATIONS[activation]
        sizes = [frame_width(shape), *(width for _ in strides)]
        self.layers = nn.ModuleList(
            nn.Conv1d(below, size, KERNEL, stride, KERNEL // 2)
            for below, size, stride in zip(sizes[:-1], sizes[1:], strides, strict=True)
        )

    def forward(self, source: Padded) -> Padded:
        values, mask = source.values.transpose(1, 2), source.mask  # B F S
        for layer, stride in zip(self.layers, self.strides, strict=True):
            values = self.activation(layer(values * mask[:, None]))
            mask = mask[:, ::stride]
        return Padded(values.transpose(1, 2), mask)

    def grid(self, length: int) -> tuple[int, ...]:
        for stride in self.strides:
            length = -(-length // stride)
        return (length,)


class FrameStacking(FrontEnd):
    """W x + b of each frame, or of several side by side as one row"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), stack: Count = 1) -> None:
        super().__init__()
        self.width, self.stack = width, stack
        self.layer = dense(frame_width(shape) * stack, width)

    def forward(self, source: Padded) -> Padded:
        shown: Tensor = source.values * source.mask[..., None]
        shown = F.pad(shown, (0, 0, 0, -shown.size(1) % self.stack))  # the last row may be short of frames
        rows = shown.unflatten(1, (-1, self.stack)).flatten(2)  # B S' F*k
        return Padded(self.layer(rows), source.mask[:, :: self.stack])

    def grid(self, length: int) -> tuple[int, ...]:
        return (-(-length // self.stack),)


def frame_width(shape: tuple[int, ...]) -> int:
    """The width of a frame; 1 where it is not known yet."""
    if len(shape) > 1:
        raise InputError(f"frames have one axis, not {len(shape)}", remedy="this front reads sound or features")
    return shape[0] if shape else 1
