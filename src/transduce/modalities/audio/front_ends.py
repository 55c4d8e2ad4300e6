"""Audio front ends: convolutional subsampling and frame stacking."""

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
    """f(conv f(conv x)): strided convolutions over three frames each

    A row is valid where the centre of its window is. Padding is set to zero before every layer, like the values beyond
    the end, so it cannot leak into valid rows.
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
    """W x + b of each frame, or of several concatenated frames"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), stack: Count = 1) -> None:
        super().__init__()
        self.width, self.stack = width, stack
        self.projection = dense(frame_width(shape) * stack, width)

    def forward(self, source: Padded) -> Padded:
        frames: Tensor = source.values * source.mask[..., None]
        frames = F.pad(frames, (0, 0, 0, -frames.size(1) % self.stack))  # the last row may have fewer frames
        rows = frames.unflatten(1, (-1, self.stack)).flatten(2)  # B S' F*k
        return Padded(self.projection(rows), source.mask[:, :: self.stack])

    def grid(self, length: int) -> tuple[int, ...]:
        return (-(-length // self.stack),)


def frame_width(shape: tuple[int, ...]) -> int:
    """The width of a frame; 1 where it is not known yet."""
    if len(shape) > 1:
        raise InputError(f"frames have one axis, not {len(shape)}", remedy="this front end reads audio frames")
    return shape[0] if shape else 1
