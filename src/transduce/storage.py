"""Crash-safe file writes; the cache directory; texts and JSON as single lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transduce.errors import InputError

TEMPORARY = ".part-"  # prefix of files that a killed process may leave behind


def sync(path: Path) -> None:
    """Flushes a file to the disk; for a folder, this makes renames inside it permanent."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: after a crash it has the old content or the new."""
    part = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    write_file(part, content)
    os.replace(part, path)
    sync(path.parent)


def cache_directory(kind: str) -> Path:
    """The folder of one kind of cached files: $XDG_CACHE_HOME/transduce/<kind>, by default under ~/.cache.

    As the XDG specification says, an empty or relative value counts as unset: otherwise files of the current folder,
    which anyone may have put there, would be read as the user's own.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise InputError("this user has no home folder", remedy="set XDG_CACHE_HOME to a folder") from error
    return base / "transduce" / kind


def single_line(text: str) -> str:
    """The text with line breaks replaced by spaces, so that an output file has one line for each input line."""
    return text.replace("\r", " ").replace("\n", " ")


def json_line(content: Mapping[str, Any]) -> str:
    """JSON on one line. Some readers also split lines at U+0085, U+2028 and U+2029, so these are escaped."""
    text = json.dumps(content, ensure_ascii=False)
    return text.translate({ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"})
