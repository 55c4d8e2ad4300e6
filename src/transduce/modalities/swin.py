"""Swin Transformer front end: self-attention in shifted windows of an image, and patch merging between stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.attention.self_attention import SelfAttention
from transduce.contracts import Count, FrontEnd, PositionEncoding, Rate, SequenceContext
from transduce.errors import InputError
from transduce.flow import Padded
from transduce.layers.feed_forward import Activation, Dropout, FeedForward, dense
from transduce.layers.norm import LayerNorm
from transduce.layers.option_groups import AttentionOptions, SublayerOptions, flat_options
from transduce.modalities.image import without_padding

MERGED = 2  # cells per side that become one


class WindowBias(PositionEncoding):
    """one learned bias per head and offset of two cells of a window, added to the scores (Liu 2021)

    The position of a cell is its number in the window, row by row.
    """

    def __init__(self, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty((2 * window - 1) ** 2, heads), std=0.02))

    def bias(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        side = self.window
        down = (queries // side)[:, :, None] - (keys // side)[:, None, :] + side - 1  # . T S
        across = (queries % side)[:, :, None] - (keys % side)[:, None, :] + side - 1
        return self.weight[down * (2 * side - 1) + across].permute(0, 3, 1, 2)  # . H T S


class WindowAttention(nn.Module):
    """Self-attention within windows of cells, which are shifted by `shift` cells down and to the right.

    Zero cells fill incomplete windows. A window that the shift wraps around the edge of the image holds cells that are
    no neighbours: they do not attend to each other.
    """

    def __init__(self, width: int, heads: int, window: int, shift: int, dropout: float) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.attention = SelfAttention(width, SublayerOptions(AttentionOptions(heads, attention_dropout=dropout)))
        self.position = WindowBias(heads, window)

    def forward(self, cells: Tensor) -> Tensor:
        rows, columns = cells.shape[1:3]
        values = F.pad(cells, (0, 0, 0, -columns % self.window, 0, -rows % self.window))  # B Y X D
        shape = values.shape
        if self.shift:
            values = values.roll((-self.shift, -self.shift), (1, 2))
        windows = self._windows(values)  # B*N W*W D
        index = torch.arange(windows.size(1), device=cells.device)[None]
        mask = self._neighbours(shape[1], shape[2], cells.device).repeat(len(cells), 1, 1, 1) if self.shift else None
        context = SequenceContext(self.position, index, index, mask)
        attended, _, _ = self.attention(windows, self.attention.start(len(windows), windows), context)
        across = shape[2] // self.window
        blocks = attended.view(len(cells), -1, across, self.window, self.window, shape[3])  # B N/A A W W D
        values = blocks.transpose(2, 3).reshape(shape)
        if self.shift:
            values = values.roll((self.shift, self.shift), (1, 2))
        return values[:, :rows, :columns]

    def _windows(self, values: Tensor) -> Tensor:
        """B Y X D -> B*N W*W D: the cells of each window."""
        blocks = values.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))  # B N/A W A W D
        return blocks.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def _neighbours(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """N 1 W*W W*W: the pairs of cells of each shifted window that are on the same side of the edge."""
        wrapped = [torch.arange(side, device=device) >= side - self.shift for side in (rows, columns)]
        regions = 2 * wrapped[0].long()[:, None] + wrapped[1].long()  # Y X
        numbers = self._windows(regions[None, :, :, None])  # N W*W 1
        return (numbers == numbers.transpose(1, 2))[:, None]


class SwinLayer(nn.Module):
    """x + attention(norm(x)) within windows, then x + FFN(norm(x))"""

    def __init__(
        self, attention: WindowAttention, feed_forward: FeedForward, norms: tuple[LayerNorm, LayerNorm], dropout: float
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = attention, feed_forward
        self.self_attention_norm, self.feed_forward_norm = norms
        self.dropout = Dropout(dropout)

    def forward(self, cells: Tensor) -> Tensor:
        cells = cells + self.dropout(self.self_attention(self.self_attention_norm(cells)))
        changed: Tensor = cells + self.dropout(self.feed_forward(self.feed_forward_norm(cells)))
        return changed


class PatchMerging(nn.Module):
    """W norm([a; b; c; d]): four neighbouring cells become one of twice the width

    A row or a column of zeros completes an odd number of them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LayerNorm(MERGED**2 * width)
        self.projection = dense(MERGED**2 * width, 2 * width, bias=False)

    def forward(self, cells: Tensor) -> Tensor:
        cells = F.pad(cells, (0, 0, 0, cells.size(2) % MERGED, 0, cells.size(1) % MERGED))  # B Y X D
        parts = [cells[:, row::MERGED, column::MERGED] for column in range(MERGED) for row in range(MERGED)]
        merged: Tensor = self.projection(self.norm(torch.cat(parts, -1)))  # B Y/2 X/2 2D
        return merged


class SwinStage(nn.Module):
    """Layers over a grid of cells, every other one with shifted windows, and patch merging unless it is the last."""

    def __init__(self, layers: list[SwinLayer], merging: PatchMerging | None) -> None:
        super().__init__()
        self.layers, self.merging = nn.ModuleList(layers), merging

    def forward(self, cells: Tensor) -> Tensor:
        for layer in self.layers:
            cells = layer(cells)
        return cells if self.merging is None else self.merging(cells)


@dataclass(frozen=True)
class SwinOptions:
    """The options that all layers of a Swin Transformer have in common."""

    window: Count = 7  # cells per side; as many as the image has, where those are fewer
    ff_ratio: Annotated[float, Gt(0)] = 4.0  # width of the feed-forward networks, relative to that of the stage
    activation: Activation = "gelu"
    norm_eps: Annotated[float, Gt(0)] = 1e-5
    dropout: Rate = 0.0
    attention_dropout: Rate = 0.0

    def layers(self, number: int, width: int, heads: int, cells: tuple[int, int]) -> list[SwinLayer]:
        window = min(self.window, *cells)
        shifts = (0, window // 2 if min(cells) > window else 0)
        return [
            SwinLayer(
                WindowAttention(width, heads, window, shifts[layer % 2], self.attention_dropout),
                FeedForward(width, int(width * self.ff_ratio), self.activation, self.dropout),
                (LayerNorm(width, eps=self.norm_eps), LayerNorm(width, eps=self.norm_eps)),
                self.dropout,
            )
            for layer in range(number)
        ]


class SwinTransformer(FrontEnd):
    """stages of self-attention in shifted windows of patches, merged between stages; each cell a row (Liu 2021)

    `channels`: the width of the first stage, which doubles with every other. `depths`, `heads`: layers and heads of
    each stage.
    """

    @flat_options
    def __init__(
        self,
        width: int,
        *,
        shape: tuple[int, ...] = (),
        patch_size: Count = 4,
        channels: Count = 32,
        depths: tuple[Count, ...] = (2, 2),
        heads: tuple[Count, ...] = (2, 4),
        final_norm: bool = True,
        options: SwinOptions,
    ) -> None:
        super().__init__()
        if not depths or len(depths) != len(heads):
            raise InputError(f"depths: {depths} and heads: {heads}", remedy="give one number of each per stage")
        height, image_width, colours = shape or (patch_size, patch_size, 3)
        cells = -(-height // patch_size), -(-image_width // patch_size)
        self.projection = nn.Conv2d(colours, channels, patch_size, patch_size)
        self.embedding_norm, self.dropout = LayerNorm(channels), Dropout(options.dropout)
        self.stages = nn.ModuleList()
        for stage, (depth, number) in enumerate(zip(depths, heads, strict=True)):
            size, last = channels << stage, stage == len(depths) - 1
            layers = options.layers(depth, size, number, cells)
            self.stages.append(SwinStage(layers, None if last else PatchMerging(size)))
            cells = cells if last else (-(-cells[0] // MERGED), -(-cells[1] // MERGED))
        size = channels << len(depths) - 1
        self.final_norm = LayerNorm(size, eps=options.norm_eps) if final_norm else None
        self.out_proj = None if size == width else dense(size, width)
        self.width, self._cells, self._patch_size = width, cells, patch_size

    def forward(self, source: Padded) -> Padded:
        pixels = source.values.permute(0, 3, 1, 2)  # B C Y X
        pixels = F.pad(pixels, (0, -pixels.size(3) % self._patch_size, 0, -pixels.size(2) % self._patch_size))
        cells = self.dropout(self.embedding_norm(self.projection(pixels).permute(0, 2, 3, 1)))  # B Y X D
        for stage in self.stages:
            cells = stage(cells)
        cells = cells if self.final_norm is None else self.final_norm(cells)
        return without_padding((cells if self.out_proj is None else self.out_proj(cells)).flatten(1, 2))

    def grid(self, length: int) -> tuple[int, ...]:
        return self._cells
