"""Variable-resolution image patches: an image keeps its proportions and has as many patches as fit a number.

A row of a batch is a patch: its row and its column in the image, both counted from 1, then its pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, FrontEnd, Modality, VisualSource
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense
from transduce.modalities.audio import pad_frames
from transduce.modalities.image_files import EXTENSIONS, read_image

COLOURS, POSITION = 3, 2  # channels of an image; columns before the pixels


class ImagePatches(Modality):
    """patches of an image resized so that at most `max_patches` tile it, with its proportions kept (Lee 2023)

    `normalise`: pixels have mean 0 and standard deviation 1 over the image.
    """

    extensions = EXTENSIONS

    def __init__(self, *, max_patches: Count = 256, patch_size: Count = 16, normalise: bool = True) -> None:
        self._max_patches, self._patch_size, self._normalise = max_patches, patch_size, normalise

    @property
    def shape(self) -> tuple[int, ...]:
        return (POSITION + COLOURS * self._patch_size**2,)

    def read(self, source: str) -> np.ndarray:
        """S F, float32"""
        pixels = np.asarray(read_image(source), np.float32)  # Y X C
        if self._normalise:
            deviation = max(float(pixels.std()), 1 / math.sqrt(pixels.size))
            pixels = (pixels - pixels.mean()) / deviation
        grid, side = self._grid(*pixels.shape[:2]), self._patch_size
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None]  # 1 C Y X
        size = [number * side for number in grid]
        image = F.interpolate(image, size, mode="bilinear", align_corners=False, antialias=True)
        patches = F.unfold(image, side, stride=side)[0].T.unflatten(1, (COLOURS, -1))  # S C P*P
        positions = torch.cartesian_prod(*(torch.arange(1, number + 1) for number in grid))
        return torch.cat((positions.float(), patches.transpose(1, 2).flatten(1)), 1).numpy()

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self._patch_size
        scale = math.sqrt(self._max_patches * (side / height) * (side / width))
        rows, columns = (max(min(int(scale * one / side), self._max_patches), 1) for one in (height, width))
        return rows, columns

    def length(self, array: np.ndarray) -> int:
        return len(array)

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        return pad_frames([torch.tensor(array) for array in arrays])

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return [f"{int(row)},{int(column)}" for row, column in array[:, :POSITION]]

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        rows, columns = (int(number) for number in array[:, :POSITION].max(0))
        values, side = array[:, POSITION:], self._patch_size
        level = (values - values.min()) / max(float(values.max() - values.min()), 1e-9)
        cells = (255 * level).astype(np.uint8).reshape(rows, columns, side, side, COLOURS)
        return VisualSource(cells.swapaxes(1, 2).reshape(rows * side, columns * side, COLOURS), (rows, columns))


class FlattenedPatches(FrontEnd):
    """W x + r + c: patches with learned vectors of their row and column, each a row (Lee 2023)

    `max_positions`: the number of rows of an image, and of columns, counted from 0.
    """

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), max_positions: Count = 4096) -> None:
        super().__init__()
        (columns,) = shape or (POSITION + COLOURS,)
        if columns <= POSITION:
            raise InputError("a patch has a row, a column and pixels", remedy="choose the modality image_patches")
        self.width, self.projection = width, dense(columns - POSITION, width)
        self.embed_rows, self.embed_columns = nn.Embedding(max_positions, width), nn.Embedding(max_positions, width)
        for table in (self.embed_rows, self.embed_columns):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, source: Padded) -> Padded:
        row, column = (self._positions(source.values[..., number]) for number in range(POSITION))
        rows = self.projection(source.values[..., POSITION:]) + self.embed_rows(row) + self.embed_columns(column)
        return Padded(rows, source.mask)

    def _positions(self, numbers: Tensor) -> Tensor:
        return numbers.long().clamp(0, self.embed_rows.num_embeddings - 1)
