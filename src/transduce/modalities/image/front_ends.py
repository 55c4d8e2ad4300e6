"""Pixels in, rows of vectors out: patches, or the cells of a convolutional network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.contracts import Count, FrontEnd
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.layers.feed_forward import dense

Places = Literal["learned", "waves", "none"]
Norm = Callable[[int], nn.Module]


class PositionEmbedding2D(nn.Module):
    """Where a cell stands, added to its vector: learned for each, or waves over rows and columns by halves."""

    def __init__(self, grid: tuple[int, int], width: int, kind: Places) -> None:
        super().__init__()
        if kind == "learned":
            self.table = nn.Parameter(torch.randn(grid[0] * grid[1], width) * 0.02)
        elif kind == "waves":
            if width % 4:
                raise InputError(f"waves over rows and columns need a width that 4 divides, not {width}")
            self.register_buffer("table", _sinusoids(grid, width), persistent=False)
        self.kind, self.grid = kind, grid

    def forward(self, cells: Tensor) -> Tensor:
        return cells if self.kind == "none" else cells + self.table

    def refit(self, name: str, given: Tensor) -> Tensor | None:
        """A table of another size, between its places by cubic curves: weights of pictures of another resolution.

        Whose grid is not told is a square, or has the proportions of this one; None: neither can be.
        """
        sides = _sides(len(given), self.grid)
        if name != "table" or self.kind != "learned" or given.size(1) != self.table.size(1) or sides is None:
            return None
        laid = given.T.reshape(1, -1, *sides)  # 1 D Y X
        return F.interpolate(laid, self.grid, mode="bicubic").flatten(2)[0].T.contiguous()


def _sides(cells: int, like: tuple[int, int]) -> tuple[int, int] | None:
    """How many rows and columns so many cells have."""
    down = round((cells * like[0] / like[1]) ** 0.5)
    if down * like[1] == like[0] * (across := cells // max(down, 1)) and down * across == cells:
        return down, across
    side = math.isqrt(cells)
    return (side, side) if side * side == cells else None


def _sinusoids(grid: tuple[int, int], width: int) -> Tensor:
    """sin and cos of y / 10000 ** (4i / D) in one half of the width, of x in the other."""
    steps = 10_000 ** (-torch.arange(0, width // 2, 2) / (width // 2))  # D/4
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    turns = [place.flatten()[:, None] * steps for place in (y, x)]  # each S D/4
    return torch.cat([wave for turn in turns for wave in (turn.sin(), turn.cos())], -1)


class PatchEmbedding(FrontEnd):
    """W x + p: squares of pixels side by side, each a row (Dosovitskiy 2021)

    `leading`: so many learned rows before them, of which a head may read the first (<cls>).
    """

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        patch: Count = 8,
        places: Places = "learned",
        leading: Annotated[int, Ge(0), Le(64)] = 0,
    ) -> None:
        super().__init__()
        height, across, channels = shape or (patch, patch, 3)
        if height % patch or across % patch:
            raise InputError(f"patches of {patch} do not tile {height} x {across} pixels", remedy="choose a divisor")
        self.width, self._cells = width, (height // patch, across // patch)
        self.patch = nn.Conv2d(channels, width, patch, patch)
        self.places, self.leading = PositionEmbedding2D(self._cells, width, places), leading
        self.first = nn.Parameter(torch.randn(leading, width) * 0.02) if leading else None

    def forward(self, source: Padded) -> Padded:
        cells = self.places(self.patch(source.values.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))  # B S D
        if self.first is not None:
            cells = torch.cat((self.first.expand(len(cells), -1, -1), cells), 1)
        return without_padding(cells)

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells


class CNNGrid(FrontEnd):
    """cells of a convolutional network with residual blocks (He 2016), each a row (Xu 2015)"""

    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        channels: Count = 32,
        stages: Count = 3,
        blocks: Annotated[int, Ge(0), Le(64)] = 1,
        places: Places = "learned",
    ) -> None:
        super().__init__()
        height, across, colours = shape or (2**stages, 2**stages, 3)
        if height % 2**stages or across % 2**stages:
            raise InputError(f"{stages} stages cannot halve {height} x {across} pixels", remedy="choose fewer stages")
        self.width, self._cells = width, (height >> stages, across >> stages)
        sizes = [channels << stage for stage in range(stages)]
        self.enter = nn.Conv2d(colours, channels, 3, padding=1)
        self.stages = nn.ModuleList(
            DownsamplingStage(below, size, blocks, CellNorm)
            for below, size in zip([channels, *sizes[:-1]], sizes, strict=True)
        )
        self.leave = dense(sizes[-1], width)
        self.places = PositionEmbedding2D(self._cells, width, places)

    def forward(self, source: Padded) -> Padded:
        values = self.enter(source.values.permute(0, 3, 1, 2))  # B C Y X
        for stage in self.stages:
            values = stage(values)
        return without_padding(self.places(self.leave(values.flatten(2).transpose(1, 2))))  # B S D

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells


class DownsamplingStage(nn.Module):
    """x' = norm(conv x), then x' + f(x') for each block: half as many rows and columns, and residual blocks."""

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
    """Over groups of channels and the whole picture, where a picture becomes one row."""
    return nn.GroupNorm(math.gcd(8, size), size)


class CellNorm(nn.Module):
    """(x - mean) / deviation over the channels of each cell.

    Not over a batch: what a picture gives does not depend on the others. Not over the picture: a cell knows what is
    near it and nothing else, so attention has to look where things are.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size, 1, 1)), nn.Parameter(torch.zeros(size, 1, 1))

    def forward(self, values: Tensor) -> Tensor:
        centred = values - values.mean(1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5) * self.weight + self.bias


def without_padding(cells: Tensor) -> Padded:
    """Every cell is real: pictures of a batch have one size."""
    return Padded(cells, torch.ones(cells.shape[:2], dtype=torch.bool, device=cells.device))
