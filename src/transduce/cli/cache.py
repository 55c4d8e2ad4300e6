"""Command that shows, clears and limits the cache directory: cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from transduce.cli.options import open_console
from transduce.errors import InputError, nearest

Action = Literal["show", "clear", "limit"]
AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"))


def cache(
    action: Annotated[
        Action, typer.Argument(help="show: list all entries. clear: remove them. limit: set the limit and apply it.")
    ] = "show",
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="VALUE",
            help="With clear: the kind of entries to remove, such as stores. With limit: a size such as 20GB, or none.",
        ),
    ] = None,
) -> None:
    """Show, clear or limit the cache: tokenised data, embeddings, imported and downloaded models, compiled kernels.

    Everything in the cache can be made again. Tokenised data contain the raw text of the training pairs. When something
    is added and the cache is over its limit, 50 GB unless it was set, entries that were not used for a day are removed,
    the least recently used first.

    Examples:

        transduce cache

        transduce cache clear

        transduce cache clear stores

        transduce cache limit 20GB
    """
    from transduce import cache as cached
    from transduce.storage import size_text

    console = open_console()
    if action == "show":
        if value is not None:
            raise InputError("`show` takes no value", where="VALUE", remedy="transduce cache")
        _show()
        return
    if action == "limit":
        if value is None:
            raise InputError("`limit` needs a size", where="VALUE", remedy="transduce cache limit 20GB")
        cached.set_limit(cached.parse_size(value))
        removed = cached.evict()
    else:
        everything = cached.entries()
        kinds = {entry.kind for entry in everything}
        if value is not None and value not in kinds:
            raise InputError(f"nothing of the kind {value!r} is cached", where="VALUE", remedy=nearest(value, kinds))
        removed = [entry for entry in everything if value in (None, entry.kind)]
        cached.remove(removed)
    size = size_text(sum(entry.size for entry in removed))
    console.print(f"{len(removed):,} entries removed, {size}", highlight=False)


def _show() -> None:
    from rich.markup import escape
    from rich.table import Table

    from transduce import cache as cached
    from transduce.storage import cache_directory, size_text

    console, found = open_console(), cached.entries()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", "entry", "size", "last used", "made from"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for entry in reversed(found):
        origin = "unfinished" if entry.unfinished else entry.origin
        table.add_row(entry.kind, escape(_short(entry.path)), size_text(entry.size), _age(entry.used), escape(origin))
    if found:
        console.print(table)
    total = size_text(sum(entry.size for entry in found))
    console.print(
        f"{cache_directory()}: {len(found):,} entries, {total}; limit {cached.limit_text()}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _short(path: Path) -> str:
    return path.name if len(path.name) <= 16 else f"{path.name[:12]}..."


def _age(used: float) -> str:
    seconds = max(time.time() - used, 0)
    for length, unit in AGES:
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"
