"""The names of pictures in; the features that a frozen network finds in them in batches out, and their rows.

What is kept of a picture are its features, so the store of the data is their cache: the network reads a picture once.
Beside the features of a cell its pixels are kept, small, for the eye of whoever asks where a model looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from transduce.contracts import Count, FrontEnd, Modality, VisualSource
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense
from transduce.modalities.image.efficientnet import CHANNELS, grid_features, load_efficientnet
from transduce.modalities.image.files import ENDINGS, fit, pillow, read_image
from transduce.modalities.image.front_ends import Places, PositionEmbedding2D, without_padding

SMALL = 8  # pixels of a side of a cell that are kept


class ImageFeatures(Modality):
    """a picture as a frozen network sees it (EfficientNet-Lite0): a grid of features, computed once and kept

    `network`: a file of weights, made by `transduce convert`. `cell`: pixels of a side of a cell.
    """

    endings = ENDINGS

    def __init__(
        self,
        *,
        network: str = "",
        size: Count = 224,
        cell: Literal[16, 32] = 32,
        fitted: Literal["crop", "pad", "stretch"] = "crop",
    ) -> None:
        if size % cell:
            raise InputError(f"cells of {cell} do not tile {size} pixels", remedy=f"choose a multiple of {cell}")
        self._network, self._size, self._cell, self._fitted = network, size, cell, fitted

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._size // self._cell, self._size // self._cell, CHANNELS[self._cell])

    def read(self, named: str) -> np.ndarray:
        """Y X C+192, float16: the features of each cell, and its pixels."""
        pixels = fit(read_image(named), self._size, self._size, self._fitted)
        found = grid_features(load_efficientnet(self._network), torch.from_numpy(pixels.copy()), self._cell).numpy()
        rows = self.shape[0]
        small = pillow().Image.fromarray(pixels).resize((rows * SMALL, rows * SMALL))
        cells = np.asarray(small).reshape(rows, SMALL, rows, SMALL, 3).swapaxes(1, 2).reshape(rows, rows, -1)
        return np.concatenate((found, cells), -1).astype(np.float16)

    def length(self, kept: np.ndarray) -> int:
        return len(kept)

    def padded(self, kept: Sequence[np.ndarray], draws: Sequence[np.random.Generator] | None = None) -> Padded:
        values = torch.from_numpy(np.stack([one[..., : self.shape[2]] for one in kept])).float()  # B Y X C
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def label(self, kept: np.ndarray, grid: Sequence[int]) -> list[str]:
        return [f"{row + 1},{column + 1}" for row in range(grid[0]) for column in range(grid[1])]

    def scene(self, kept: np.ndarray, grid: Sequence[int]) -> VisualSource:
        rows, columns = kept.shape[:2]
        cells = kept[..., self.shape[2] :].astype(np.uint8).reshape(rows, columns, SMALL, SMALL, 3)
        return VisualSource(cells.swapaxes(1, 2).reshape(rows * SMALL, columns * SMALL, 3), (grid[0], grid[1]))


class FeatureGrid(FrontEnd):
    """W x + p: cells that were computed before, each a row"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), places: Places = "learned") -> None:
        super().__init__()
        height, across, channels = shape or (1, 1, 8)
        self.width, self._cells = width, (height, across)
        self.enter, self.places = dense(channels, width), PositionEmbedding2D(self._cells, width, places)

    def forward(self, source: Padded) -> Padded:
        return without_padding(self.places(self.enter(source.values).flatten(1, 2)))  # B S D

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells
