"""The names of films in, frames in batches out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from transduce.contracts import Count, Modality, VisualSource
from transduce.flow import Padded
from transduce.modalities.image.files import fit
from transduce.modalities.video.files import MOVING, VIDEOS, read_video


class Video(Modality):
    """a film, as so many frames of one size taken evenly: a folder of pictures, an animation or a video"""

    endings = MOVING + VIDEOS

    def __init__(
        self,
        *,
        frames: Count = 8,
        size: Count = 64,
        width: Count | None = None,
        fitted: Literal["crop", "pad", "stretch"] = "crop",
    ) -> None:
        self._frames, self._height, self._width, self._fitted = frames, size, width or size, fitted

    @property
    def shape(self) -> tuple[int, ...]:
        """Frames too: every film has as many."""
        return (self._frames, self._height, self._width, 3)

    def read(self, named: str) -> np.ndarray:
        pictures = read_video(named, self._frames)
        return np.stack([fit(picture, self._height, self._width, self._fitted) for picture in pictures])  # S Y X C

    def length(self, kept: np.ndarray) -> int:
        return self._frames

    def padded(self, kept: Sequence[np.ndarray], draws: Sequence[np.random.Generator] | None = None) -> Padded:
        values = torch.from_numpy(np.stack(kept)).float() / 127.5 - 1  # B S Y X C
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def label(self, kept: np.ndarray, grid: Sequence[int]) -> list[str]:
        times, *cells = grid
        names = [f":{row + 1},{column + 1}" for row in range(cells[0]) for column in range(cells[1])] if cells else [""]
        return [f"{time + 1}{name}" for time in range(times) for name in names]

    def scene(self, kept: np.ndarray, grid: Sequence[int]) -> VisualSource:
        """A strip: side by side where a row of the memory is a frame; one below the other where it is a part of one,
        so that rows of the memory lie in reading order. Of frames that share their rows the middle one is shown."""
        times, *cells = grid
        shown = kept[[(2 * time + 1) * len(kept) // (2 * times) for time in range(times)]]
        if not cells:
            return VisualSource(np.concatenate(list(shown), 1), (1, times))
        return VisualSource(np.concatenate(list(shown), 0), (times * cells[0], cells[1]))
