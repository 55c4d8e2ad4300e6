"""Allocator setting of glibc: freed memory stays with the process."""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Large tensors are allocated and freed in every update. By default the C library returns them to the system and
    requests new pages, which the system clears: 4 to 11 % of an update on a CPU. The setting holds for the whole
    process, so only commands of this project make it, at their start. False: not glibc, nothing was changed."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(TRIM_THRESHOLD, NEVER)) and bool(library.mallopt(MMAP_MAX, 0))
