"""Attention weights drawn over images and spectrograms, one panel per target word, as PNG.

A pixel x of a width X belongs to cell x * columns // X of its row: each weight colours exactly the pixels of its cell.
Image grids have many rows of cells; time axes, as in audio, have one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transduce.contracts import VisualSource
from transduce.explain.attention_map import AttentionMap
from transduce.explain.png import fonts, new_figure, save, set_titles, short_label

COLOUR = np.array([214, 0, 147], np.float32)  # a colour that is rare in photographs
MAX_ALPHA = 0.7  # opacity of the largest weight
MAX_PANELS = 60  # per source; the title gives the number of words left out


def cell_indices(source: VisualSource) -> np.ndarray:
    """Y X: the index of the cell of each pixel."""
    height, width = source.pixels.shape[:2]
    rows, columns = source.grid
    down, across = np.arange(height) * rows // height, np.arange(width) * columns // width
    return down[:, None] * columns + across


def paint(source: VisualSource, weights: np.ndarray) -> np.ndarray:
    """Y X 3, uint8: the pixels, coloured by the weights of their cells (S) relative to the largest weight."""
    share = np.asarray(weights, np.float32) / max(float(np.max(weights)), 1e-12)
    alpha = MAX_ALPHA * share[cell_indices(source)][..., None]  # Y X 1
    return np.rint(source.pixels * (1 - alpha) + COLOUR * alpha).astype(np.uint8)


def source_weights(source: VisualSource, attention: AttentionMap) -> np.ndarray:
    """T S: the columns of a map that belong to the cells of one source."""
    return attention.weights[:, source.begin : source.begin + source.grid[0] * source.grid[1]]


def draw(
    sources: Sequence[VisualSource], attention: AttentionMap, path: str | Path, title: str = "", subtitle: str = ""
) -> None:
    """Draws each source alone, and then once per target word with the attention of that word."""
    words = attention.target_tokens[:MAX_PANELS]
    left_out = len(attention.target_tokens) - len(words)
    panels = [
        (label, source, weights)
        for source in sources
        for label, weights in [("", None), *zip(words, source_weights(source, attention), strict=False)]
    ]
    one_row = sources[0].grid[0] == 1  # such as time: panels are stacked vertically
    columns = 1 if one_row else min(5, max(2, math.ceil(math.sqrt(len(panels)))))
    rows = math.ceil(len(panels) / columns)
    height, width = sources[0].pixels.shape[:2]
    panel_width = 6.5 if one_row else 1.9
    panel_height = 0.75 if one_row else panel_width * min(2.0, height / width)
    figure = new_figure(
        columns * panel_width + 0.2, rows * (panel_height + 0.3) + 0.5 * bool(title) + 0.3 * bool(subtitle)
    )
    for number, (label, source, weights) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        _draw_panel(axes, source, weights, label, last=number > len(panels) - columns)
    set_titles(figure, f"{title} (and {left_out} more)" if left_out else title, subtitle)
    save(figure, path)


def _draw_panel(axes: Any, source: VisualSource, weights: np.ndarray | None, label: str, *, last: bool) -> None:
    height, width = source.pixels.shape[:2]
    shown = source.pixels if weights is None else paint(source, weights)
    has_axis = source.extent > 0
    extent = (0, source.extent if has_axis else width, height, 0)
    axes.imshow(shown, extent=extent, aspect="auto" if has_axis else "equal", interpolation="nearest")
    axes.set_title(short_label(label), fontsize=9, loc="left", pad=3, family=list(fonts()), parse_math=False)
    axes.set_yticks([])
    if not (has_axis and last):
        axes.set_xticks([])
    elif source.across:
        axes.set_xlabel(source.across, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
