"""PNG figures of attention, with matplotlib: heat maps, and weights drawn over images and spectrograms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len

from transduce.contracts import VisualSource
from transduce.explain.attention import AttentionMap, links, visible
from transduce.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_INCHES = 36.0  # height and width of an image: larger maps get smaller cells and labels
_MAX_LABEL = 24  # characters
_INK, _PALE = "#222222", "#777777"
VEIL = np.array([10, 12, 18], np.float32)  # over the parts of a picture that are not attended to, as in the studio
OPACITY = 0.8  # of the veil where the weight is 0
MAX_PANELS = 60  # per source; the title gives the number of words left out
# Tried in this order for each character, as far as they are installed.
_FONTS = (
    "DejaVu Sans, Noto Sans, Noto Sans CJK SC, Noto Sans CJK JP, Noto Sans CJK KR, Noto Sans SC, Noto Sans JP, "
    "Noto Sans KR, Noto Sans Arabic, Noto Sans Hebrew, Noto Sans Devanagari, Noto Sans Bengali, Noto Sans Tamil, "
    "Noto Sans Telugu, Noto Sans Thai, Noto Sans Ethiopic, Noto Sans Georgian, Noto Sans Armenian, Noto Sans Khmer, "
    "WenQuanYi Zen Hei, Source Han Sans SC, Droid Sans Fallback, PingFang SC, Hiragino Sans, Apple SD Gothic Neo, "
    "Arial Unicode MS, Microsoft YaHei, Yu Gothic, Malgun Gothic, Nirmala UI, Leelawadee UI, Segoe UI, Unifont"
)


@lru_cache(maxsize=1)
def fonts() -> tuple[str, ...]:
    """The installed font families, chosen to cover many scripts."""
    from matplotlib import font_manager

    present = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(name for name in _FONTS.split(", ") if name in present) or ("DejaVu Sans",)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings about characters that no font has; they are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*(Glyph|missing from|Matplotlib currently does not support).*")
        warnings.filterwarnings("ignore", message=".*constrained_layout.*")
        yield


def draw_map(attention: AttentionMap, path: str | Path, title: str = "", subtitle: str = "") -> None:
    """One heat map: the source at the top, the target at the left, the largest weight of each row in a frame."""
    rows, columns = attention.weights.shape
    cell = min(0.34, _MAX_INCHES / max(rows, columns, 1))
    width = max(3.5, columns * cell + _label_inches(attention.target_tokens) + 0.9)
    height = max(
        2.0, rows * cell + _label_inches(attention.source_tokens) + 0.3 + 0.35 * bool(title) + 0.3 * bool(subtitle)
    )
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    image = _draw_heat_map(axes, attention, size=max(2.5, min(10.0, 30 * cell)))
    # Inset axes, so that the colour bar is as high as the map and not as the figure.
    map_width = max(columns * cell, 0.5)
    bar = figure.colorbar(image, cax=axes.inset_axes((1 + 0.12 / map_width, 0, 0.1 / map_width, 1)))
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=7, length=2, colors=_PALE)
    set_titles(figure, title, subtitle)
    save(figure, path)


def draw_grid(
    maps: Sequence[tuple[str, AttentionMap]], path: str | Path, title: str = "", subtitle: str = "", columns: int = 0
) -> None:
    """Several maps of one pair, such as all heads, in panels; labels only at the outer edges."""
    if not maps:
        raise ValueError("a grid needs at least one map")
    columns = columns or math.ceil(math.sqrt(len(maps)))
    rows = math.ceil(len(maps) / columns)
    example = maps[0][1]
    cell = min(0.2, _MAX_INCHES / max(example.weights.shape[0] * rows, example.weights.shape[1] * columns, 1))
    width = (example.weights.shape[1] * cell + 0.2) * columns + _label_inches(example.target_tokens)
    height = (example.weights.shape[0] * cell + 0.4) * rows + _label_inches(example.source_tokens) + 0.8
    figure = new_figure(max(3.5, width), max(2.5, height))
    for number, (name, attention) in enumerate(maps):
        axes = figure.add_subplot(rows, columns, number + 1)
        _draw_heat_map(axes, attention, size=max(2.5, min(7.5, 36 * cell)))
        axes.tick_params(labeltop=number < columns, labelleft=number % columns == 0)
        axes.set_xlabel(visible(name), fontsize=8, color=_PALE, parse_math=False)
    set_titles(figure, title, subtitle)
    save(figure, path)


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(min(width, _MAX_INCHES + 6), min(height, _MAX_INCHES + 6)), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)  # not pyplot: no global state, no window, safe in threads
    return figure


def _draw_heat_map(axes: Axes, attention: AttentionMap, size: float) -> Any:
    from matplotlib.patches import Rectangle

    image = axes.imshow(attention.weights, cmap="Blues", vmin=0, vmax=1, aspect="equal", interpolation="nearest")
    _label_axes(axes, attention.source_tokens, attention.target_tokens, size)
    for source, target in links(attention):
        corner = (source - 0.44, target - 0.44)
        axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor="#e8590c", linewidth=max(0.4, size / 8)))
    return image


def _label_axes(axes: Axes, columns: Sequence[str], rows: Sequence[str], size: float) -> None:
    """Labels of the columns above, of the rows at the left."""
    for side, tokens in (("x", columns), ("y", rows)):
        step = max(1, math.ceil(len(tokens) / 400))  # more labels would be illegible at any size
        ticks = range(0, len(tokens), step)
        style: dict[str, Any] = {"fontsize": size, "family": list(fonts()), "color": _INK, "parse_math": False}
        getattr(axes, f"set_{side}ticks")(ticks, [short_label(tokens[i]) for i in ticks], **style)
    axes.tick_params(top=False, bottom=False, left=False, right=False, labeltop=True, labelbottom=False, pad=3)
    for label in axes.get_xticklabels():
        label.set_rotation(0 if len(label.get_text()) <= 2 else 90)
    axes.spines[:].set_visible(False)


def _label_inches(tokens: Sequence[str]) -> float:
    """The space for the longest label at ten points. `cell_len` counts CJK characters twice."""
    return 0.09 * max((cell_len(short_label(token)) for token in tokens), default=1)


def short_label(token: str) -> str:
    return _truncate(token, _MAX_LABEL)


def _truncate(text: str, max_length: int) -> str:
    text = visible(text)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def set_titles(figure: Figure, title: str, subtitle: str) -> None:
    """The title above and the subtitle below, left-aligned; the layout engine reserves the space."""
    max_length = max(20, int(figure.get_figwidth() * 11))
    style: dict[str, Any] = {"x": 0.01, "ha": "left", "family": list(fonts()), "parse_math": False}
    if title:
        figure.suptitle(_truncate(title, max_length), fontsize=11, color=_INK, **style)
    if subtitle:
        figure.supxlabel(_truncate(subtitle, max_length), fontsize=8, color=_PALE, **style)


def save(figure: Figure, path: str | Path) -> None:
    width, height = figure.get_size_inches()
    with _quiet(), atomic_path(path) as part:
        # Agg stops at 2^16 pixels a side; 200 dots an inch is sharp in print.
        figure.savefig(part, format="png", dpi=min(200, 30_000 / max(width, height)))


def cell_indices(source: VisualSource) -> np.ndarray:
    """Y X: the index of the cell of each pixel. Pixel x of a width X is in column x * columns // X of its row.

    Image grids have many rows of cells; time axes, as in audio, have one.
    """
    height, width = source.pixels.shape[:2]
    rows, columns = source.grid
    down, across = np.arange(height) * rows // height, np.arange(width) * columns // width
    return down[:, None] * columns + across


def paint(source: VisualSource, weights: np.ndarray, largest: float) -> np.ndarray:
    """Y X 3, uint8: the pixels under a veil, clear where the weight of a cell (S) is the largest of all panels."""
    share = np.asarray(weights, np.float32) / max(largest, 1e-12)
    alpha = OPACITY * (1 - share[cell_indices(source)][..., None])  # Y X 1
    return np.rint(source.pixels * (1 - alpha) + VEIL * alpha).astype(np.uint8)


def source_weights(source: VisualSource, attention: AttentionMap) -> np.ndarray:
    """T S: the columns of a map that belong to the cells of one source."""
    return attention.weights[:, source.begin : source.begin + source.grid[0] * source.grid[1]]


def other_columns(sources: Sequence[VisualSource], attention: AttentionMap) -> list[int]:
    """The columns of a map that no picture shows, such as the words of a question."""
    shown = {one.begin + cell for one in sources for cell in range(one.grid[0] * one.grid[1])}
    return [column for column in range(len(attention.source_tokens)) if column not in shown]


def draw_overlay(
    sources: Sequence[VisualSource], attention: AttentionMap, path: str | Path, title: str = "", subtitle: str = ""
) -> None:
    """Draws each source alone, and then once per target word with the attention of that word.

    Columns that belong to no picture, such as the words of a question, are a heat map below. One scale serves all
    panels and the map: a source that is hardly attended to stays dark.
    """
    words = attention.target_tokens[:MAX_PANELS]
    left_out = len(attention.target_tokens) - len(words)
    largest = float(attention.weights[: len(words)].max(initial=0))
    panels = [
        (label, source, weights)
        for source in sources
        for label, weights in [("", None), *zip(words, source_weights(source, attention), strict=False)]
    ]
    one_row = sources[0].grid[0] == 1  # such as time: panels are stacked vertically
    columns = 1 if one_row else min(5, max(2, math.ceil(math.sqrt(len(panels)))))
    rows, others = math.ceil(len(panels) / columns), other_columns(sources, attention)
    height, width = sources[0].pixels.shape[:2]
    panel_width = 6.5 if one_row else 1.9
    panel_height = 0.3 + (0.75 if one_row else panel_width * min(2.0, height / width))
    map_height = 0.25 * len(words) + _label_inches([attention.source_tokens[one] for one in others]) if others else 0.0
    figure = new_figure(
        max(columns * panel_width, 0.34 * len(others) + 1) + 0.2,
        rows * panel_height + map_height + 0.5 * bool(title) + 0.3 * bool(subtitle),
    )
    grid = figure.add_gridspec(
        rows + bool(others), columns, height_ratios=[panel_height] * rows + [map_height] * bool(others)
    )
    for number, (label, source, weights) in enumerate(panels):
        axes = figure.add_subplot(grid[number // columns, number % columns])
        _draw_panel(axes, source, None if weights is None else paint(source, weights, largest), label)
        if number < len(panels) - columns:
            axes.set_xticks([])
    if others:
        _draw_other_columns(figure.add_subplot(grid[rows, :]), attention, others, len(words), largest)
    set_titles(figure, f"{title} (and {left_out} more)" if left_out else title, subtitle)
    save(figure, path)


def _draw_other_columns(axes: Axes, attention: AttentionMap, columns: Sequence[int], rows: int, largest: float) -> None:
    """A heat map of some columns, dark and light as the veil of the panels, and on their scale."""
    weights = attention.weights[:rows, columns]
    axes.imshow(weights, cmap="gray", vmin=0, vmax=max(largest, 1e-12), aspect="equal")
    _label_axes(axes, [attention.source_tokens[one] for one in columns], attention.target_tokens[:rows], 8)


def _draw_panel(axes: Any, source: VisualSource, painted: np.ndarray | None, label: str) -> None:
    height, width = source.pixels.shape[:2]
    shown = source.pixels if painted is None else painted
    has_axis = source.extent > 0
    extent = (0, source.extent if has_axis else width, height, 0)
    axes.imshow(shown, extent=extent, aspect="auto" if has_axis else "equal", interpolation="nearest")
    name = short_label(label.strip() or label)
    axes.set_title(name, fontsize=9, loc="left", pad=3, family=list(fonts()), parse_math=False)
    axes.set_yticks([])
    if not has_axis:
        axes.set_xticks([])
    elif source.across:
        axes.set_xlabel(source.across, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
