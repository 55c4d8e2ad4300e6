"""Attention maps as heat maps in the terminal, with and without colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from transduce.explain.attention import AttentionMap, visible

_MAX_HEADER = 10  # rows of a column header
_MAX_LABEL = 18  # terminal cells of a row label
_SHADES = "░▒▓█"  # quarters, for terminals without colour
_ASCII = str.maketrans("·…⋮␣░▒▓█", "..:_.:*#")


def draw(attention: AttentionMap, console: Console, width: int | None = None) -> None:
    """Target positions as rows, source positions as columns; a long source continues in panels below."""
    if not attention.source_tokens or not attention.target_tokens:
        console.print("(nothing to draw: one side is empty)")
        return
    ascii_only = console.options.ascii_only
    rows = [_label(token, ascii_only) for token in attention.target_tokens]
    columns = [_label(token, ascii_only) for token in attention.source_tokens]
    margin = min(_MAX_LABEL, max(map(cell_len, rows))) + 1
    space = (width or console.width) - margin
    cell = 4 if 4 * len(columns) <= space else 3  # a shade, two digits, and a blank if the columns fit
    per_panel = max(1, space // cell)
    for start in range(0, len(columns), per_panel):
        part = slice(start, start + per_panel)
        for line in _header(columns[part], cell):
            _print(console, Text(" " * margin + line, style="bold"))
        for label, weights in zip(rows, attention.weights, strict=True):
            cells = [_cell(float(weight), cell, console) for weight in weights[part]]
            _print(console, Text.assemble((_fit(label, margin - 1) + " ", "bold"), *cells))
        _print(console, Text())
    _print(console, _legend(console))


def draw_strongest(attention: AttentionMap, console: Console, count: int = 4) -> None:
    """The source positions with the largest weights for each target position."""
    ascii_only = console.options.ascii_only
    rows = [_label(token, ascii_only) for token in attention.target_tokens]
    margin = min(_MAX_LABEL, max(map(cell_len, rows), default=0)) + 1
    for label, weights in zip(rows, attention.weights, strict=True):
        best = sorted(range(len(weights)), key=lambda position: -float(weights[position]))[:count]
        tokens = [_label(attention.source_tokens[position], ascii_only) for position in best]
        parts = [f"{token} {100 * weights[position]:.0f}%" for token, position in zip(tokens, best, strict=True)]
        _print(console, Text.assemble((_fit(label, margin - 1) + " ", "bold"), "  ".join(parts)))
    _print(
        console,
        Text("the positions with the largest weights of each word; --html and --png show all of them", style="dim"),
    )


def _print(console: Console, line: Text) -> None:
    if console.options.ascii_only:
        line = Text(line.plain.translate(_ASCII))
    console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def _label(token: str, ascii_only: bool) -> str:
    text = visible(token) or "·"
    return text.encode("ascii", "replace").decode() if ascii_only else text


def grapheme_clusters(text: str) -> list[str]:
    """User-perceived characters: a base character with its combining marks and joined parts."""
    result: list[str] = []
    for character in text:
        joined = bool(result) and result[-1].endswith("\u200d")
        if result and (joined or character in "\u200c\u200d" or unicodedata.category(character).startswith("M")):
            result[-1] += character
        else:
            result.append(character)
    return result


def _fit(text: str, width: int) -> str:
    """The text cut or padded to exactly `width` terminal cells, in any script."""
    if cell_len(text) > width:
        prefix = ""
        for cluster in grapheme_clusters(text):
            if cell_len(prefix + cluster) > width - 1:
                break
            prefix += cluster
        text = prefix + "…"
    return text + " " * (width - cell_len(text))


def _header(labels: Sequence[str], cell: int) -> list[str]:
    """Labels written vertically, ending just above their columns."""
    stacks = [grapheme_clusters(label) for label in labels]
    stacks = [stack if len(stack) <= _MAX_HEADER else [*stack[: _MAX_HEADER - 1], "⋮"] for stack in stacks]
    height = max(map(len, stacks))
    stacks = [[""] * (height - len(stack)) + stack for stack in stacks]
    return ["".join(_column(cluster, cell) for cluster in line).rstrip() for line in zip(*stacks, strict=True)]


def _column(cluster: str, cell: int) -> str:
    """One character over its column: narrow characters above the last digit, wide ones above both."""
    size = cell_len(cluster)
    if size > 2:  # joined emoji, which some terminals draw separately
        cluster, size = "\ufffd", 1
    return " " * (cell - size) + cluster


def _cell(weight: float, cell: int, console: Console) -> tuple[str, Style]:
    percent = min(99, round(100 * weight))  # two digits: 99 stands for 100
    digits = f"{percent:>2}" if percent else " ·"
    if console.color_system is None:
        shade = _SHADES[percent // 25] if percent else " "
        return " " * (cell - 3) + shade + digits, Style()
    return f"{digits:>{cell}}", _style(weight)


def _style(weight: float) -> Style:
    """A background from pale to deep blue, with a legible text colour."""
    if weight < 0.005:
        return Style(dim=True)
    share = min(1.0, weight) ** 0.5  # the square root keeps small weights visible
    pale, deep = (222, 235, 247), (8, 69, 148)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(pale, deep, strict=True))
    ink = "#ffffff" if share > 0.55 else "#08306b"
    return Style(color=ink, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _legend(console: Console) -> Text:
    words = ("percent of each row  ", Style(dim=True))
    if console.color_system is None:
        ranges = ("1-24", "25-49", "50-74", "75-99")
        return Text.assemble(words, "  ".join(f"{a} {b}" for a, b in zip(_SHADES, ranges, strict=True)))
    swatches = [(f" {round(100 * weight):>2} ", _style(weight)) for weight in (0.01, 0.1, 0.25, 0.5, 0.75, 0.99)]
    return Text.assemble(words, *swatches)
