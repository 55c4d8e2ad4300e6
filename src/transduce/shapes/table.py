"""Rows in, tables for people or a JSON file out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.disk import replace_file
from transduce.shapes.letters import Row


def draw(rows: Sequence[Row], console: Console) -> None:
    """One table a section; modules are indented by their path."""
    for section in dict.fromkeys(row.section for row in rows):
        lettered = section != "parameters" and not section.endswith("letters")
        table = Table(title=section, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in ("name", "letters", "sizes", "meaning") if lettered else ("name", "sizes", "meaning"):
            table.add_column(column, style="cyan" if column == "letters" else None, overflow="fold")
        before: list[str] = []
        for row in (row for row in rows if row.section == section):
            name, before = _indent(row.name, before) if section.endswith("modules") else (row.name, before)
            sizes = " ".join(f"{size:,}" for size in row.sizes)
            table.add_row(escape(name), *([row.letters] if lettered else []), sizes, escape(row.meaning))
        console.print(table, "", highlight=False)


def _indent(name: str, before: list[str]) -> tuple[str, list[str]]:
    """What is new in a name after the one before it, set in by what is not."""
    path, colon, place = name.partition(":")
    parts = path.split(".")
    differing = (i for i, (new, old) in enumerate(zip(parts, before, strict=False)) if new != old)
    same = next(differing, min(len(parts), len(before)))
    return "  " * same + ".".join(parts[same:]) + colon + place, parts


def save(rows: Sequence[Row], path: Path) -> None:
    replace_file(path, (json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n").encode())
