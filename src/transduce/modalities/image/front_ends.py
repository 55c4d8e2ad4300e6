"""Image front ends: patch embedding, convolutional feature grid, precomputed feature grid."""

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

PositionKind = Literal["learned", "sinusoidal", "none"]
Norm = Callable[[int], nn.Module]


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
    """W x + p: precomputed features of the cells of a grid, each a row"""

    def __init__(self, width: int, *, shape: tuple[int, ...] = (), position: PositionKind = "learned") -> None:
        super().__init__()
        height, grid_width, channels = shape or (1, 1, 8)
        self.width, self._cells = width, (height, grid_width)
        self.in_proj = dense(channels, width)
        self.position_embedding = PositionEmbedding2D(self._cells, width, position)

    def forward(self, source: Padded) -> Padded:
        return without_padding(self.position_embedding(self.in_proj(source.values).flatten(1, 2)))  # B S D

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells


def without_padding(rows: Tensor) -> Padded:
    """Rows B S D without padding: all images of a batch have the same size."""
    return Padded(rows, torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device))
