"""Figures of claims, with matplotlib: PNG files, and SVG to put into a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transduce.claims.claim import Panel, Series
from transduce.explain.png import new_figure
from transduce.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b5bdb", "#e8590c", "#2b8a3e", "#ae3ec9", "#0c8599", "#c92a2a", "#f08c00", "#5f3dc4")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH, HEIGHT, ACROSS = 4.6, 3.4, 3  # inches of a panel, and panels in a row


def draw(panels: Sequence[Panel]) -> Figure:
    """All panels of a claim, at most three in a row."""
    columns = 2 if len(panels) == 4 else min(len(panels), ACROSS)
    rows = -(-len(panels) // columns)
    figure = new_figure(WIDTH * columns, HEIGHT * rows)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        {"line": _lines, "bar": _bars, "points": _points, "heat": _heat}[panel.kind](axes, panel)
        axes.set_title(panel.title, loc="left", fontsize=9, color="#222222")
        axes.set_xlabel(panel.x_label, fontsize=8)
        axes.set_ylabel(panel.y_label, fontsize=8)
        axes.tick_params(labelsize=6 if panel.kind == "heat" or len(panel.series[0].x) > 8 else 7, which="both")
    return figure


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """The figure as a PNG file. Equal panels give equal bytes."""
    with atomic_path(path) as part:
        draw(panels).savefig(part, format="png", dpi=110, metadata={"Software": None})


def svg(panels: Sequence[Panel]) -> str:
    """The figure as an SVG element. Letters are paths, so that no font is needed."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "transduce"}):
        draw(panels).savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _lines(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import NullLocator

    solid = sum(not series.dashed for series in panel.series)
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % solid % len(COLOURS)]  # dashed curves come last and repeat the colours
        style: dict[str, Any] = {"color": colour, "linewidth": 1.0 if series.dashed else 1.6, "markersize": 3.5}
        marker = "" if series.dashed else MARKERS[number % len(MARKERS)]
        if len(series.low):
            axes.fill_between(
                np.asarray(series.x, float), series.low, series.high, color=colour, alpha=0.15, linewidth=0
            )
        axes.plot(
            series.x, series.y, "--" if series.dashed else "-", marker=marker, label=series.label or None, **style
        )
    if panel.log_x:
        axes.set_xscale("log")
        ticks = sorted({float(x) for series in panel.series for x in series.x})
        axes.set_xticks(ticks if len(ticks) <= 6 else ticks[:: len(ticks) // 4])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
    _finish(axes, panel)


def _bars(axes: Axes, panel: Panel) -> None:
    width = 0.8 / max(len(panel.series), 1)
    names = [str(name) for name in panel.series[0].x]
    for number, series in enumerate(panel.series):
        places = np.arange(len(names)) + (number - (len(panel.series) - 1) / 2) * width
        axes.bar(places, series.y, width, color=COLOURS[number % len(COLOURS)], label=series.label)
        if len(series.low):
            axes.vlines(places, series.low, series.high, color="#222222", linewidth=1)
    turned: dict[str, Any] = {"rotation": 90} if len(names) > 8 else {"rotation": 15} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    _finish(axes, panel)


def _points(axes: Axes, panel: Panel) -> None:
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % len(COLOURS)]
        axes.scatter(np.asarray(series.x, float), series.y, s=12, color=colour, label=series.label)
        for x, y, name in zip(series.x, series.y, series.names, strict=False):
            axes.annotate(name, (float(x), y), fontsize=5, color=colour, xytext=(2, 2), textcoords="offset points")
    _finish(axes, panel)


def _heat(axes: Axes, panel: Panel) -> None:
    drawn = axes.imshow(np.array([series.y for series in panel.series]), cmap="Blues", aspect="auto", vmin=0)
    labels = [str(name) for name in panel.series[0].x]
    axes.set_xticks(range(len(labels)), labels, fontsize=6, rotation=90 if max(map(len, labels)) > 2 else 0)
    axes.set_yticks(range(len(panel.series)), [series.label for series in panel.series], fontsize=6)
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)


def _finish(axes: Axes, panel: Panel) -> None:
    if panel.log_y:
        axes.set_yscale("log")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if _named(panel.series):
        axes.legend(frameon=False, fontsize=6.5)


def _named(series: Sequence[Series]) -> bool:
    return any(one.label for one in series)
