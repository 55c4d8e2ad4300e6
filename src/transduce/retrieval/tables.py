"""What was found enters; tables and lines of text for people and programs leave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.evaluation.scoring import json_line
from transduce.retrieval.clustering import Clustering, telling_words
from transduce.retrieval.search import Hit

_CENTRAL = 3  # lines that describe a group


def show_hits(query: str, hits: Sequence[Hit], documents: Sequence[str], console: Console) -> None:
    console.print(f"[bold]{escape(query)}[/]", highlight=False, soft_wrap=True)
    table = Table("cosine", "line", "text", box=None, header_style="dim", pad_edge=False)
    for hit in hits:
        table.add_row(f"{hit.cosine:.3f}", f"{hit.row + 1:,}", escape(documents[hit.row]))
    console.print(table)


def hits_as_json(query: str, hits: Sequence[Hit], documents: Sequence[str]) -> str:
    """One query on one line; `line` counts from 1, as editors do."""
    found = [{"cosine": hit.cosine, "line": hit.row + 1, "text": documents[hit.row]} for hit in hits]
    return json_line({"query": query, "hits": found})


def show_clusters(vectors: np.ndarray, lines: Sequence[str], clustering: Clustering, console: Console) -> None:
    """Each group with its size, its telling words, and the lines nearest to its centre."""
    for number in range(len(clustering.centres)):
        size = int((clustering.labels == number).sum())
        words = ", ".join(telling_words(lines, clustering.labels, number))
        console.print(f"[bold]{number + 1}[/]  {size:,} lines  [cyan]{escape(words)}[/]", highlight=False)
        for row in clustering.central(vectors, number, _CENTRAL):
            console.print(f"   [dim]{escape(lines[row])}[/]", highlight=False, soft_wrap=True)


def write_clusters(lines: Sequence[str], clustering: Clustering, path: Path) -> None:
    """`group TAB line`, in the order of the lines."""
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        for label, line in zip(clustering.labels, lines, strict=True):
            stream.write(f"{label + 1}\t{line}\n")
