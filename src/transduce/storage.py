"""Paths in, files that outlive a crash out."""

from __future__ import annotations

import os
from pathlib import Path

TEMPORARY = ".part-"  # what a killed process may leave behind begins with this


def sync(path: Path) -> None:
    """To the disk, not only to the kernel; for a folder this is what makes a rename in it last."""
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
    """The new content or the old one, whatever happens meanwhile."""
    part = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    write_file(part, content)
    os.replace(part, path)
    sync(path.parent)
