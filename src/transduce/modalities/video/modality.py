"""Video modality and its front ends: frame embedding and tubelet embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from transduce.contracts import Count, FrontEnd, Modality, VisualSource
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense
from transduce.modalities.image.files import fit
from transduce.modalities.image.front_ends import DownsamplingStage, without_padding
from transduce.modalities.video.files import ANIMATIONS, VIDEOS, frame_indices, read_video


class Video(Modality):
    """a video, as a fixed number of uniformly sampled frames: a folder of images, an animation or a video file"""

    extensions = ANIMATIONS + VIDEOS

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
        """Frames included: every video has the same number."""
        return (self._frames, self._height, self._width, 3)

    def read(self, source: str) -> np.ndarray:
        images = read_video(source, self._frames)
        return np.stack([fit(image, self._height, self._width, self._fitted) for image in images])  # S Y X C

    def length(self, array: np.ndarray) -> int:
        return self._frames

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        values = torch.from_numpy(np.stack(arrays)).float() / 127.5 - 1  # B S Y X C
        return Padded(values, torch.ones(values.shape[:2], dtype=torch.bool))

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        times, *cells = grid
        names = [f":{row + 1},{column + 1}" for row in range(cells[0]) for column in range(cells[1])] if cells else [""]
        return [f"{time + 1}{name}" for time in range(times) for name in names]

    def visualise(self, array: np.ndarray, grid: Sequence[int]) -> VisualSource:
        """A strip of frames: side by side where a row of the memory is a frame; one below the other where it is part of
        a frame, so that the rows of the memory are in reading order. Of frames that share rows the middle one is shown.
        """
        times, *cells = grid
        shown = array[frame_indices(len(array), times)]
        if not cells:
            return VisualSource(np.concatenate(list(shown), 1), (1, times))
        return VisualSource(np.concatenate(list(shown), 0), (times * cells[0], cells[1]))


class FrameEmbedding(FrontEnd):
    """W [cells of a convolutional network] + p_t: each frame is one row that keeps the layout of its cells"""

    def __init__(
        self, width: int, *, shape: tuple[int, ...] = (), channels: Count = 8, stages: Count = 3, places: bool = True
    ) -> None:
        super().__init__()
        frames, height, frame_width, colours = shape or (1, 2**stages, 2**stages, 3)
        if height % 2**stages or frame_width % 2**stages:
            raise InputError(
                f"{stages} stages cannot halve {height} x {frame_width} pixels", remedy="choose fewer stages"
            )
        self.width, self._frames = width, frames
        sizes = [min(channels << stage, 4 * channels) for stage in range(stages)]
        self.stages = nn.ModuleList(
            DownsamplingStage(below, size) for below, size in zip([colours, *sizes[:-1]], sizes, strict=True)
        )
        self.out_proj = dense(sizes[-1] * (height >> stages) * (frame_width >> stages), width)
        self.position_embedding = nn.Parameter(torch.randn(frames, width) * 0.02) if places else None

    def forward(self, source: Padded) -> Padded:
        size, frames = source.values.shape[:2]
        cells = source.values.flatten(0, 1).permute(0, 3, 1, 2)  # B*S C Y X
        for stage in self.stages:
            cells = stage(cells)
        rows = self.out_proj(cells.flatten(1)).view(size, frames, -1)  # B S D
        return Padded(rows if self.position_embedding is None else rows + self.position_embedding, source.mask)

    def grid(self, length: int) -> tuple[int, ...]:
        return (self._frames,)


class TubeletEmbedding(FrontEnd):
    """W x + p: blocks of pixels over several frames, each a row (Arnab et al. 2021)"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), patch: Count = 8, through: Count = 2) -> None:
        super().__init__()
        frames, height, frame_width, colours = shape or (through, patch, patch, 3)
        if height % patch or frame_width % patch or frames % through:
            raise InputError(
                f"tubelets of {through} x {patch} x {patch} do not tile {frames} frames of {height} x {frame_width}"
                " pixels",
                remedy="choose divisors",
            )
        self.width, self._cells = width, (frames // through, height // patch, frame_width // patch)
        tubelet = (through, patch, patch)
        self.projection = nn.Conv3d(colours, width, tubelet, tubelet)
        cells = self._cells[0] * self._cells[1] * self._cells[2]
        self.position_embedding = nn.Parameter(torch.randn(cells, width) * 0.02)

    def forward(self, source: Padded) -> Padded:
        rows: Tensor = self.projection(source.values.permute(0, 4, 1, 2, 3)).flatten(2).transpose(1, 2)  # B S' D
        return without_padding(rows + self.position_embedding)

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells
