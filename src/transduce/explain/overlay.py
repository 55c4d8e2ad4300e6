"""What a person sees of a source, and weights, in; the weights painted over it out, one panel a word, as PNG.

A pixel x of X belongs to the cell x * columns // X of its row, exactly: a cell is painted on the pixels that it stands
for and on no other. Nothing here knows what was perceived: some scenes have many rows of cells, some one, along a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transduce.contracts import VisualSource
from transduce.explain.alignment import AttentionMap
from transduce.explain.png import begin_figure, entitle, fonts, save, shortened

COLOUR = np.array([214, 0, 147], np.float32)  # rare in what is seen, so it is not taken for a part of it
STRONGEST = 0.7  # how much of its own colour a cell loses at most
MOST = 60  # panels of one scene; a longer text is cut, and the title says so


def cell_of(scene: VisualSource) -> np.ndarray:
    """Y X: the number of the cell that each pixel belongs to."""
    height, width = scene.pixels.shape[:2]
    rows, columns = scene.grid
    down, across = np.arange(height) * rows // height, np.arange(width) * columns // width
    return down[:, None] * columns + across


def paint(scene: VisualSource, weights: np.ndarray) -> np.ndarray:
    """Y X 3 bytes: the scene under the weights of its cells (S), which are brought to their largest."""
    share = np.asarray(weights, np.float32) / max(float(np.max(weights)), 1e-12)
    alpha = STRONGEST * share[cell_of(scene)][..., None]  # Y X 1
    return np.rint(scene.pixels * (1 - alpha) + COLOUR * alpha).astype(np.uint8)


def over(scene: VisualSource, attention: AttentionMap) -> np.ndarray:
    """T S: what each row of a map gave to the cells of a scene."""
    return attention.weights[:, scene.begin : scene.begin + scene.grid[0] * scene.grid[1]]


def draw(
    scenes: Sequence[VisualSource], attention: AttentionMap, path: str | Path, title: str = "", subtitle: str = ""
) -> None:
    """Every scene as it is, and then once for each word with what it looked at."""
    words = attention.target_tokens[:MOST]
    more = len(attention.target_tokens) - len(words)
    panels = [
        (label, scene, weights)
        for scene in scenes
        for label, weights in [("", None), *zip(words, over(scene, attention), strict=False)]
    ]
    lines = scenes[0].grid[0] == 1  # along one line, such as time: panels below each other
    columns = 1 if lines else min(5, max(2, math.ceil(math.sqrt(len(panels)))))
    rows = math.ceil(len(panels) / columns)
    height, width = scenes[0].pixels.shape[:2]
    side = 6.5 if lines else 1.9
    tall = 0.75 if lines else side * min(2.0, height / width)
    figure = begin_figure(columns * side + 0.2, rows * (tall + 0.3) + 0.5 * bool(title) + 0.3 * bool(subtitle))
    for number, (label, scene, weights) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        _panel(axes, scene, weights, label, last=number > len(panels) - columns)
    entitle(figure, f"{title} (and {more} more)" if more else title, subtitle)
    save(figure, path)


def _panel(axes: Any, scene: VisualSource, weights: np.ndarray | None, label: str, *, last: bool) -> None:
    height, width = scene.pixels.shape[:2]
    shown = scene.pixels if weights is None else paint(scene, weights)
    long = scene.extent > 0
    extent = (0, scene.extent if long else width, height, 0)
    axes.imshow(shown, extent=extent, aspect="auto" if long else "equal", interpolation="nearest")
    axes.set_title(shortened(label), fontsize=9, loc="left", pad=3, family=list(fonts()), parse_math=False)
    axes.set_yticks([])
    if not (long and last):
        axes.set_xticks([])
    elif scene.across:
        axes.set_xlabel(scene.across, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
