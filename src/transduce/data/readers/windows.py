"""Windows of lines: many enough to sort by length, few enough for memory and for a reader who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from transduce.data.readers.corpus import numbered_texts
from transduce.data.readers.files import open_lines
from transduce.flow import Example

LINES, CHARACTERS = 2000, 1 << 20  # of one window
Item = TypeVar("Item")


def in_windows(
    items: Iterable[Item],
    characters: Callable[[Any], int] = len,
    *,
    size: int = LINES,
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[list[Item]]:
    """Groups of items, in order. A window ends at its limits, or where the next item would have to be waited for."""
    window: list[Item] = []
    total = 0
    for item in items:
        window.append(item)
        total += characters(item)
        if len(window) >= size or total >= CHARACTERS or not ready():
            yield window
            window, total = [], 0
    if window:
        yield window


def example_characters(example: Example) -> int:
    """The characters of a source and its target."""
    return len(example.source) + len(example.target or "")


def read_windows(path: str | Path) -> Iterator[list[str]]:
    """The lines of a text file, or of standard input for "-". Of a pipe or a terminal, those that have come so far."""
    with open_lines(str(path)) as lines:
        yield from in_windows(numbered_texts(lines, str(path)), ready=lines.ready)
