"""Image modalities: pixels, and features of a frozen network.

`ImageFeatures` stores the features of an image, so the data store serves as their cache: the network processes every
image once. A thumbnail of each cell is stored beside its features, to display attention over the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from transduce.contracts import Count, Modality, VisualSource
from transduce.data.readers.folders import idx_array
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.layers.option_groups import flat_options
from transduce.modalities.image.efficientnet import CHANNELS, grid_features, load_efficientnet
from transduce.modalities.image.files import EXTENSIONS, ImageAugmentation, Resampling, fit, pillow, read_image

THUMBNAIL = 8  # pixels per side of the stored thumbnail of a cell


def cell_labels(grid: Sequence[int]) -> list[str]:
    """`row,column` of every cell, counted from 1."""
    return [f"{row + 1},{column + 1}" for row in range(grid[0]) for column in range(grid[1])]


class Image(Modality):
    """an image resized to a fixed size: rows of pixels, (value - mean) / std

    In training batches it is augmented at random: flip, shift, crop, rotate, colour (image/files.py).
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
        resize_mode: Literal["crop", "pad", "stretch"] = "crop",
        interpolation: Resampling = "bicubic",
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        augmentation: ImageAugmentation,
    ) -> None:
        self._height, self._width = size, width or size
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
        return fit(image, self._height, self._width, self._resize_mode, self._resampling)

    def length(self, array: np.ndarray) -> int:
        return self._height

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        images = arrays if rngs is None else [self._augment(*pair) for pair in zip(arrays, rngs, strict=True)]
        values = (torch.from_numpy(np.stack(images)).float() - self._mean) / self._std  # B Y X C
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
