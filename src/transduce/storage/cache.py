"""Cached files of the user: what there is, the time of its last use, and its removal beyond a limit.

<cache directory>/stores/KEY/      tokenised data with their raw text: data/store.py
                  vectors/KEY/     embeddings of the lines of a file: inference/retrieval.py
                  imported/KEY/    converted models of other libraries, hub/NAME/ downloaded ones: interop/__init__.py
                  native/          compiled kernels
                  limit            the limit in bytes, where it was set

The time of the last use of an entry is its modification time, which `mark_used` sets.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.errors import InputError
from transduce.storage import TEMPORARY, cache_directory, is_cached, make_folder, replace_file, size_text

LIMIT = "limit"
DEFAULT_LIMIT = 50e9  # bytes
NATIVE = "native"  # too small to be worth compiling again: only `clear` removes it
META, ORIGIN = "meta.json", "origin.txt"
RECENT = 24 * 3600.0  # seconds in which an entry may be in use, or still be written
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache directory."""

    kind: str
    path: Path
    size: int  # bytes
    used: float  # seconds since the epoch
    origin: str  # what it was made from

    @property
    def unfinished(self) -> bool:
        return self.path.name.startswith(".") or self.path.name.endswith(".part")


def cache_entries() -> list[CacheEntry]:
    """All entries, the least recently used first."""
    found = [
        CacheEntry(folder.name, path, _size(path), used, _origin(path))
        for folder in _list(cache_directory())
        if folder.is_dir() and not folder.is_symlink()
        for path in _list(folder)
        if (used := _modified(path)) is not None
    ]
    return sorted(found, key=lambda entry: (entry.used, entry.path))


def _list(folder: Path) -> list[Path]:
    with suppress(OSError):  # removed by another process, or not readable
        return sorted(folder.iterdir())
    return []


def _modified(path: Path) -> float | None:
    """None: another process renamed or removed it."""
    with suppress(OSError):
        return path.lstat().st_mtime
    return None


def _size(path: Path) -> int:
    """The bytes of a file, or of all files in a folder. Links are not followed."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
    return sum(_size(one) for one in _list(path))


def _origin(path: Path) -> str:
    """What an entry was made from: the names in its metadata, or its own name."""
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        if (path / ORIGIN).is_file():
            return (path / ORIGIN).read_text(encoding="utf-8").strip()
        if (path / META).is_file():
            content: dict[str, Any] = json.loads((path / META).read_bytes())
            return ", ".join(map(str, content["names"]))
    return path.name.replace("--", "/")


def mark_used(path: Path) -> None:
    """Notes that an entry was used now."""
    if is_cached(path):
        with suppress(OSError):  # a read-only cache is evicted by nobody
            os.utime(path)


def remove_entries(found: Sequence[CacheEntry]) -> int:
    """Removes entries; returns the bytes that this freed. A process that has mapped a file keeps reading it."""
    freed = 0
    for entry in found:
        # Renamed first, so that a killed removal leaves nothing that looks complete.
        renamed = entry.path.with_name(f"{TEMPORARY}{os.getpid()}-removed-{entry.path.name[-60:]}")
        try:
            os.replace(entry.path, renamed)
            shutil.rmtree(renamed) if renamed.is_dir() and not renamed.is_symlink() else renamed.unlink()
        except FileNotFoundError:  # another process was first
            continue
        except OSError as error:
            warnings.warn(f"{entry.path} cannot be removed: {error.strerror or error}", stacklevel=2)
        else:
            freed += entry.size
    return freed


def cache_limit() -> float:
    """The limit of the cache directory in bytes, infinite where it was set to `none`."""
    with suppress(OSError, ValueError):
        size = float((cache_directory() / LIMIT).read_text(encoding="ascii"))
        if size >= 0:  # not NaN
            return size
    return DEFAULT_LIMIT


def set_cache_limit(size: float) -> None:
    make_folder(cache_directory())
    replace_file(cache_directory() / LIMIT, f"{size:.0f}\n")


def parse_size(text: str) -> float:
    """Bytes of `20GB`, `500 MB`, `1.5T`, or of `none`: no limit."""
    if text.strip().lower() == "none":
        return math.inf
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise InputError(f"{text!r} is not a size", where="SIZE", remedy="give a size such as 20GB or 500MB, or none")
    return float(match[1]) * UNITS[match[2]]


def evict(unused_since: float = math.inf) -> list[CacheEntry]:
    """Removes entries that were not used since a time until the cache is under its limit; returns them.

    The least recently used go first. What a process left unfinished a day ago goes in any case.
    """
    everything = cache_entries()
    evicted = [entry for entry in everything if entry.unfinished and entry.used < time.time() - RECENT]
    excess = _total(everything) - _total(evicted) - cache_limit()
    for entry in everything:
        if excess > 0 and entry.used < unused_since and not entry.unfinished and entry.kind != NATIVE:
            evicted.append(entry)
            excess -= entry.size
    remove_entries(evicted)
    return evicted


def _total(found: Sequence[CacheEntry]) -> int:
    return sum(entry.size for entry in found)


def entry_added(path: Path) -> None:
    """Applies the limit after an entry was added, with a notice. What was used within a day may be in use: it stays."""
    if not is_cached(path) or math.isinf(cache_limit()):
        return
    evicted, left = evict(time.time() - RECENT), _total(cache_entries())
    notices = []
    if evicted:
        notices.append(f"removed {len(evicted)} entries ({size_text(_total(evicted))}), the least recently used")
    if left > cache_limit():
        notices.append(f"it holds {size_text(left)}, all of it used within a day")
    if notices:
        warnings.warn(
            f"{cache_directory()} has a limit of {cache_limit_text()}: {'; '.join(notices)} "
            "(`transduce cache limit SIZE` changes it)",
            stacklevel=3,
        )


def cache_limit_text() -> str:
    return "none" if math.isinf(cache_limit()) else size_text(cache_limit())
