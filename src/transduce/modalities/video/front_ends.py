"""Frames in, rows of vectors out: one a frame, or one for a block of pixels through some frames."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.contracts import Count, FrontEnd
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense
from transduce.modalities.image.front_ends import DownsamplingStage


class FrameEmbedding(FrontEnd):
    """W [cells of a convolutional network] + p_t: each frame is one row, which knows what stands where in it"""

    def __init__(
        self, width: int, *, shape: tuple[int, ...] = (), channels: Count = 8, stages: Count = 3, places: bool = True
    ) -> None:
        super().__init__()
        frames, height, across, colours = shape or (1, 2**stages, 2**stages, 3)
        if height % 2**stages or across % 2**stages:
            raise InputError(f"{stages} stages cannot halve {height} x {across} pixels", remedy="choose fewer stages")
        self.width, self._frames = width, frames
        sizes = [min(channels << stage, 4 * channels) for stage in range(stages)]
        self.stages = nn.ModuleList(
            DownsamplingStage(below, size) for below, size in zip([colours, *sizes[:-1]], sizes, strict=True)
        )
        self.leave = dense(sizes[-1] * (height >> stages) * (across >> stages), width)
        self.places = nn.Parameter(torch.randn(frames, width) * 0.02) if places else None

    def forward(self, source: Padded) -> Padded:
        size, frames = source.values.shape[:2]
        cells = source.values.flatten(0, 1).permute(0, 3, 1, 2)  # B*S C Y X
        for stage in self.stages:
            cells = stage(cells)
        rows = self.leave(cells.flatten(1)).view(size, frames, -1)  # B S D
        return Padded(rows if self.places is None else rows + self.places, source.mask)

    def grid(self, length: int) -> tuple[int, ...]:
        return (self._frames,)


class TubeletEmbedding(FrontEnd):
    """W x + p: blocks of pixels through some frames, each a row (Arnab 2021)"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), patch: Count = 8, through: Count = 2) -> None:
        super().__init__()
        frames, height, across, colours = shape or (through, patch, patch, 3)
        if height % patch or across % patch or frames % through:
            raise InputError(
                f"blocks of {through} x {patch} x {patch} do not tile {frames} frames of {height} x {across} pixels",
                remedy="choose divisors",
            )
        self.width, self._cells = width, (frames // through, height // patch, across // patch)
        block = (through, patch, patch)
        self.block = nn.Conv3d(colours, width, block, block)
        self.places = nn.Parameter(torch.randn(self._cells[0] * self._cells[1] * self._cells[2], width) * 0.02)

    def forward(self, source: Padded) -> Padded:
        rows: Tensor = self.block(source.values.permute(0, 4, 1, 2, 3)).flatten(2).transpose(1, 2)  # B S' D
        return Padded(rows + self.places, torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device))

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells
