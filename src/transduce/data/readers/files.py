"""File access: decompression and numbered lines, with errors that name the file."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from transduce.errors import InputError

_BOM = b"\xef\xbb\xbf"  # the byte order mark of UTF-8


@contextmanager
def open_bytes(path: str) -> Iterator[Any]:
    """Opens a file for its stored bytes."""
    try:
        stream = open(path, "rb")  # noqa: SIM115 (only the opening may fail here)
    except FileNotFoundError:
        raise InputError("no such file", where=path) from None
    except IsADirectoryError:
        raise InputError("a directory, not a file", where=path, remedy="give a file in it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be opened: {error}", where=path) from None
    with stream:
        yield stream


def stored_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines numbered from 1, split only at line feeds, without carriage return and byte order mark; "-" is stdin."""
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
            yield number, line.removeprefix(_BOM) if number == 1 else line
    except (EOFError, OSError, zlib.error) as error:
        remedy = "the file is damaged or was not copied completely"
        raise InputError(f"cannot be read further: {error}", where=f"{path}:{number + 1}", remedy=remedy) from None


class _Zstandard(io.RawIOBase):
    """Decompresses frame by frame. The reader of the zstandard library accepts truncated files."""

    def __init__(self, stream: IO[bytes], path: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise InputError(".zst needs zstandard", where=path, remedy="pip install 'transduce[zstd]'") from None
        self._error = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._stream = stream
        self._current: Any = None  # the frame being decompressed
        self._compressed = self._decompressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            self._compressed = self._compressed or self._stream.read(1 << 17)
            if not self._compressed:
                if self._current is not None:
                    raise EOFError("the compressed file ends before its end-of-stream marker")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count

    def _decompress(self) -> None:
        self._current = self._current or self._frame()
        try:
            self._decompressed = self._current.decompress(self._compressed)
        except self._error as error:
            raise OSError(str(error)) from None
        self._compressed = b""
        if self._current.eof:
            self._compressed, self._current = self._current.unused_data, None
