"""A path enters, its bytes or its numbered lines leave, unpacked; a file that cannot be read is named."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from transduce.errors import InputError

_MARK = b"\xef\xbb\xbf"  # the byte order mark of UTF-8


@contextmanager
def open_bytes(path: str) -> Iterator[Any]:
    """The bytes as they are stored."""
    try:
        stream = open(path, "rb")  # noqa: SIM115 (only the opening may fail here)
    except FileNotFoundError:
        raise InputError("no such file", where=path) from None
    except IsADirectoryError:
        raise InputError("a directory, not a file", where=path, remedy="name the files in it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be opened: {error}", where=path) from None
    with stream:
        yield stream


def stored_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines from 1 on, split at line feeds alone, without carriage return and byte order mark; "-": standard input."""
    if path == "-":
        yield from _numbered(sys.stdin.buffer, "standard input")
        return
    with open_bytes(path) as stream:
        if path.endswith(".gz"):
            yield from _numbered(gzip.GzipFile(fileobj=stream), path)
        elif path.endswith(".zst"):
            yield from _numbered(io.BufferedReader(_Zstandard(stream, path), 1 << 17), path)
        else:
            yield from _numbered(stream, path)


def _numbered(stream: Any, path: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for raw in stream:
            line = raw.removesuffix(b"\n").removesuffix(b"\r")
            number += 1
            yield number, line.removeprefix(_MARK) if number == 1 else line
    except (EOFError, OSError, zlib.error) as error:
        remedy = "the file is damaged or was not copied completely"
        raise InputError(f"cannot be read on: {error}", where=f"{path}:{number + 1}", remedy=remedy) from None


class _Zstandard(io.RawIOBase):
    """Unpacks frame after frame. The library's own reader takes a truncated file for a complete one."""

    def __init__(self, stream: IO[bytes], path: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise InputError(".zst needs zstandard", where=path, remedy="pip install 'transduce[zstd]'") from None
        self._error = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._stream = stream
        self._current: Any = None  # the frame being unpacked
        self._packed = self._unpacked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._stream.read(1 << 17)
            if not self._packed:
                if self._current is not None:
                    raise EOFError("the compressed file ends before its end-of-stream marker")
                return 0
            self._unpack()
        taken = min(len(buffer), len(self._unpacked))
        buffer[:taken] = self._unpacked[:taken]
        self._unpacked = self._unpacked[taken:]
        return taken

    def _unpack(self) -> None:
        self._current = self._current or self._frame()
        try:
            self._unpacked = self._current.decompress(self._packed)
        except self._error as error:
            raise OSError(str(error)) from None
        self._packed = b""
        if self._current.eof:
            self._packed, self._current = self._current.unused_data, None
