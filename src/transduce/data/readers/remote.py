"""Remote files: addresses of fsspec (s3://, gs://, https://, memory://), with retries of reads that fail."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from transduce.errors import InputError

ATTEMPTS = 8  # of one operation; an object store that fails 10 % of the reads fails 8 in a row once in 10^8
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds between attempts: doubled each time
# Errors that another attempt does not mend.
FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    ImportError,
    ValueError,
    InputError,
)
HUB = "hf://"  # data sets of the Hugging Face Hub, which have a reader of their own
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")  # of the file systems of fsspec
Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    """Whether a path is an address of fsspec."""
    return "://" in path and not path.startswith(HUB)


def retried(operation: Callable[[], Result]) -> Result:
    """The result of an operation on a remote file, after as many attempts as it needs."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return operation()
        except FINAL:
            raise
        except Exception as error:  # each protocol has errors of its own library, few of which are an OSError
            if attempt == ATTEMPTS:
                raise OSError(f"{ATTEMPTS} attempts failed: {error}") from error
            time.sleep(min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT))
    raise AssertionError("unreachable")


def open_remote(path: str) -> io.BufferedReader:
    """A remote file for its stored bytes. Missing files and protocols are errors, others are tried again."""
    return io.BufferedReader(_Retrying(path), 1 << 20)


def matching_addresses(pattern: str) -> list[str]:
    """The addresses that match a pattern, sorted."""
    files, name = _filesystem(pattern)
    try:
        found = retried(lambda: files.glob(name))
    except (OSError, NotImplementedError) as error:
        raise InputError(f"cannot be listed: {error}", where=pattern, remedy="name the files") from None
    return sorted(files.unstrip_protocol(one) for one in found)


def file_state(path: str) -> dict[str, str]:
    """Facts about a file that are others when its content has changed: its size, its version or time."""
    if path.startswith(HUB):
        return {}
    if not is_remote(path):
        try:
            state = os.stat(path)
        except OSError as error:
            raise InputError(f"cannot be opened: {error.strerror}", where=path) from None
        return {"size": str(state.st_size), "version": str(state.st_mtime_ns)}
    files, name = _filesystem(path)
    try:
        facts = retried(lambda: files.info(name))
    except OSError as error:
        raise InputError(f"cannot be opened: {error or 'no such file'}", where=path) from None
    version = next((facts[one] for one in VERSIONS if facts.get(one) is not None), "")
    return {"size": str(facts.get("size")), "version": str(version)}


def _filesystem(path: str) -> tuple[Any, str]:
    """The file system of an address, and the name of the file in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        remedy = "pip install 'transduce[remote]'"
        raise InputError("remote files need fsspec", where=path, remedy=remedy) from None
    try:
        files, name = url_to_fs(path)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose library is missing
        raise InputError(str(error), where=path, remedy="install the library of this protocol") from None
    return files, str(name)


class _Retrying(io.RawIOBase):
    """A file that is opened again, at the same position, after a read that failed."""

    def __init__(self, path: str) -> None:
        self._path, self._position = path, 0
        self._files, self._name = _filesystem(path)
        self._stream: Any = None
        self._size: int | None = None
        retried(self._open)

    def _open(self) -> None:
        stream = self._files.open(self._name, "rb")
        size = getattr(stream, "size", None)
        if self._stream is not None and size != self._size:
            stream.close()
            raise InputError("the file has changed while it was read", where=self._path, remedy="read it again")
        self._stream, self._size = stream, size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._stream.seekable())

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self._size if self._size is not None else int(self._files.size(self._name))
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = retried(lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, count: int) -> bytes:
        try:
            if self._stream.tell() != self._position:
                _advance(self._stream, self._position)
            content: bytes = self._stream.read(count)
            return content
        except FINAL:
            raise
        except Exception:
            self._open()
            raise

    def close(self) -> None:
        if not self.closed and self._stream is not None:
            self._stream.close()
        super().close()


def _advance(stream: Any, position: int) -> None:
    """Moves to a position; a stream without random access reads on to it."""
    if stream.seekable():
        stream.seek(position)
        return
    while stream.tell() < position:
        if not stream.read(min(position - stream.tell(), 1 << 20)):
            raise OSError("the file ends before the position that was read before")
