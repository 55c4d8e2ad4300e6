"""Atomic file writes that report errors with the path; the place of the cache; texts and JSON as single lines.

Every file that the package writes goes through this room (tests/test_storage.py walks the source). A reader sees the
old content or the new, never a part of it, and an error of the operating system becomes a `WriteError`.
"""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from transduce.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY = ".part-"  # prefix of files that a killed process may leave behind
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ELSEWHERE = "or write to another disk"
REMEDIES = {
    errno.ENOSPC: f"free space on the disk, {ELSEWHERE}",
    errno.EDQUOT: f"free space of your quota, {ELSEWHERE}",
    errno.EFBIG: f"raise the limit on the size of files (ulimit -f), {ELSEWHERE}",
    errno.EROFS: "the file system is read-only: write to another folder",
    errno.EACCES: "change the permissions, or write to another folder",
    errno.EPERM: "change the permissions, or write to another folder",
    errno.ENOENT: "create the folder first",
    errno.ENOTDIR: "a part of the path is a file: give another path",
    errno.EISDIR: "this is a folder: give the name of a file",
}
_LINES: Any = {"encoding": "utf-8", "newline": "\n"}
_numbers = itertools.count()


class WriteError(InputError):
    """A file or folder that cannot be written, given as a path, or an output that has only a name."""

    def __init__(self, path: str | Path, error: OSError, remedy: str = "") -> None:
        reason = error.strerror or str(error)
        super().__init__(
            f"cannot be written: {reason}{_free_space(path, error)}",
            where=str(path),
            remedy=remedy or REMEDIES.get(error.errno or 0, "check the path and the disk"),
        )
        self.path, self.error = Path(path), error

    @property
    def problem_at(self) -> str:
        """One line for a warning."""
        return f"{self.where} {self.problem}"


def _free_space(path: str | Path, error: OSError) -> str:
    """The free bytes of the disk, where they explain the error."""
    if error.errno not in DISK_ERRORS or isinstance(path, str) or path.is_char_device() or path.is_fifo():
        return ""
    folder = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    with suppress(OSError):
        return f" ({size_text(shutil.disk_usage(folder).free)} free)"
    return ""


def size_text(size: float) -> str:
    """A number of bytes for people: 1,234 bytes, 12.3 MB."""
    if size < 10_000:
        return f"{size:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:,.3g} TB"


@contextmanager
def reporting(path: str | Path, remedy: str = "") -> Iterator[None]:
    """Turns an OSError about this path, or about a temporary file, into a WriteError. Other files keep their errors."""
    try:
        yield
    except WriteError as error:
        if not _is_temporary(error.path):
            raise
        raise WriteError(Path(path), error.error, remedy) from error
    except OSError as error:
        named = error.filename
        if isinstance(named, str | os.PathLike) and not _is_temporary(Path(named)) and not _contains(named, path):
            raise
        raise WriteError(Path(path), error, remedy) from error


@contextmanager
def optional_write(path: str | Path, consequence: str) -> Iterator[None]:
    """Turns an error about this path into a warning: for files that are not worth stopping for."""
    try:
        with reporting(path):
            yield
    except WriteError as error:
        warnings.warn(f"{error.problem_at}: {consequence}", stacklevel=3)


def _is_temporary(path: Path) -> bool:
    return any(part.startswith(TEMPORARY) for part in path.parts)


def _contains(folder: str | os.PathLike[str], path: str | Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def sync(path: Path) -> None:
    """Flushes a file to the disk; for a folder, this makes renames inside it permanent."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_new(path: Path, flags: int = 0) -> int:
    """Creates or truncates a file; the umask applies. In the cache directory, only the user may read it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | (flags or os.O_TRUNC), 0o600 if is_cached(path) else 0o666)


def make_folder(path: Path) -> Path:
    """Creates a folder and its parents; the umask applies. In the cache directory, only the user may open it."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(0o700 if is_cached(folder) else 0o777, exist_ok=True)
    return path


def write_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a file of a folder that is not in use yet: see `staged_folder`. Raises an OSError."""
    with open(open_new(path), "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def replace_file(path: str | Path, content: bytes | str) -> None:
    """Replaces a file atomically: after a crash it has the old content or the new."""
    with open_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomic(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends without an error."""
    with atomic_path(path) as part, open(part, "wb") as file:
        yield file


@contextmanager
def open_text(path: str | Path, *, grows: bool = False) -> Iterator[TextIO]:
    """A text file of lines, which becomes `path` when the block ends without an error.

    `grows`: others read the file while it grows; after an error of the disk it ends with a whole line.
    """
    if grows:
        with reporting(path), _whole_lines(Path(path)), open(open_new(Path(path)), "w", **_LINES) as file:
            yield file
    else:
        with atomic_path(path) as part, open(part, "w", **_LINES) as file:
            yield file


@contextmanager
def _whole_lines(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        if path.is_file() and path.stat().st_size:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            os.truncate(path, end)
        raise


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """The name of an empty file that becomes `path` when the block ends without an error, and is removed otherwise.

    Its name ends like that of `path`. A link keeps its name, and a pipe or a device is written in place.
    """
    with reporting(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            yield Path(path)
            return
        part = _temporary(target)
        os.close(open_new(part, os.O_EXCL))
        try:
            mode = (target if target.exists() else part).stat().st_mode & 0o777
            yield part
            os.chmod(part, mode)
            sync(part)
            os.replace(part, target)
            sync(target.parent)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def staged_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder whose files appear in `path` when the block ends without an error.

    A folder that does not exist or is empty appears at once; in another one, files of the same name are replaced.
    """
    with reporting(path):
        target = Path(os.path.realpath(path))
        make_folder(target.parent)
        part = make_folder(_temporary(target))
        try:
            yield part
            _publish(part, target)
            sync(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _temporary(target: Path) -> Path:
    return target.with_name(f"{_prefix()}{os.getpid()}.{next(_numbers)}-{target.name[-30:]}")  # at most 255 bytes


def _prefix() -> str:
    return f"{TEMPORARY}{socket.gethostname()[:60]}."


def _publish(part: Path, target: Path) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        os.replace(part, target)
        return
    for source in sorted(part.rglob("*")):
        place = target / source.relative_to(part)
        if source.is_dir():
            place.mkdir(exist_ok=True)
        else:
            os.replace(source, place)


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file of a folder that is not in use yet. Raises an OSError, whatever the library raises."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    os.close(open_new(Path(path)))
    mode = os.stat(path).st_mode & 0o777  # the library creates another file, with mode 0600
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata is not None else None)
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    os.chmod(path, mode)
    sync(Path(path))


def remove_incomplete(folder: Path) -> None:
    """Removes what dead processes of this host left half-written in this folder."""
    prefix = _prefix()
    for path in folder.glob(f"{TEMPORARY}*"):
        process = path.name.removeprefix(prefix).partition(".")[0]
        if path.name.startswith(prefix) and process.isdecimal() and not is_alive(int(process)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Whether another process of this host is running."""
    if process == os.getpid():  # as in a restarted container: it has begun no file yet
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def cache_directory(kind: str = "") -> Path:
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


def is_cached(path: Path) -> bool:
    """Whether a path lies in the cache directory."""
    try:
        return path.absolute().is_relative_to(cache_directory())
    except InputError:  # no home folder, so no cache directory
        return False


def single_line(text: str) -> str:
    """The text with line breaks replaced by spaces, so that an output file has one line for each input line."""
    return text.replace("\r", " ").replace("\n", " ")


def json_line(content: Mapping[str, Any]) -> str:
    """JSON on one line. Some readers also split lines at U+0085, U+2028 and U+2029, so these are escaped."""
    text = json.dumps(content, ensure_ascii=False)
    return text.translate({ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"})
