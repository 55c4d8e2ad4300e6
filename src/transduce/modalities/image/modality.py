"""The names of pictures in, pixels in batches out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt

from transduce.contracts import Count, Modality, Rate, VisualSource
from transduce.data.readers.folders import idx_array
from transduce.errors import InputError, UnreadableError
from transduce.flow import Padded
from transduce.modalities.image.augmentation import ImageAugmentation
from transduce.modalities.image.files import ENDINGS, Resampling, fit, pillow, read_image


class Image(Modality):
    """a picture, brought to one size: rows of pixels, (value - mean) / spread

    In training batches it is mirrored, moved, cut out, turned and coloured at random, as far as it is told: see
    changes.py. `FILE#17` is one of many in a file of arrays.
    """

    endings = ENDINGS

    def __init__(
        self,
        *,
        size: Count = 64,
        width: Count | None = None,
        channels: Literal[1, 3] = 3,
        fitted: Literal["crop", "pad", "stretch"] = "crop",
        smooth: Resampling = "bicubic",
        mean: tuple[float, ...] = (0.5,),
        spread: tuple[float, ...] = (0.5,),
        flip: Rate = 0.0,
        shift: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
        crop: Rate = 0.0,
        rotate: Annotated[float, Ge(0), Lt(180)] = 0.0,
        colour: Rate = 0.0,
    ) -> None:
        self._height, self._width = size, width or size
        self._channels, self._fitted, self._smooth = channels, fitted, smooth
        for name, given in (("mean", mean), ("spread", spread)):
            if len(given) not in (1, channels) or (name == "spread" and min(given) <= 0):
                raise InputError(f"{name}: {list(given)}", remedy=f"one number, or {channels}; a spread is above 0")
        self._mean, self._spread = torch.tensor(mean) * 255, torch.tensor(spread) * 255
        self._changes = ImageAugmentation(flip, shift, crop, rotate, colour)

    @property
    def shape(self) -> tuple[int, ...]:
        """Height too: the rows of a picture are its rows of pixels, and every picture has as many."""
        return (self._height, self._width, self._channels)

    def read(self, named: str) -> np.ndarray:
        picture = _one_of_many(named) if "#" in named and not Path(named).is_file() else None
        if picture is None:
            picture = read_image(named, self._channels)
        elif picture.mode != ("RGB" if self._channels == 3 else "L"):
            picture = picture.convert("RGB" if self._channels == 3 else "L")
        return fit(picture, self._height, self._width, self._fitted, self._smooth)

    def length(self, kept: np.ndarray) -> int:
        return self._height

    def padded(self, kept: Sequence[np.ndarray], draws: Sequence[np.random.Generator] | None = None) -> Padded:
        pictures = kept if draws is None else [self._changes(*one) for one in zip(kept, draws, strict=True)]
        values = (torch.from_numpy(np.stack(pictures)).float() - self._mean) / self._spread  # B Y X C
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def label(self, kept: np.ndarray, grid: Sequence[int]) -> list[str]:
        return [f"{row + 1},{column + 1}" for row in range(grid[0]) for column in range(grid[1])]

    def scene(self, kept: np.ndarray, grid: Sequence[int]) -> VisualSource:
        return VisualSource(np.repeat(kept, 3, 2) if self._channels == 1 else kept, (grid[0], grid[1]))


def _one_of_many(named: str) -> Any:
    values = idx_array(named)
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3):
        raise UnreadableError("not a picture", f"{named} holds {values.dtype} of shape {list(values.shape)}")
    return pillow().Image.fromarray(np.ascontiguousarray(values))
