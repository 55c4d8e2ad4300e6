"""File access: formats by name, decompression, numbered lines, with errors that name the file."""

from __future__ import annotations

import gzip
import io
import os
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from transduce.data.readers.remote import HUB, is_remote, open_remote
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

_BOM = b"\xef\xbb\xbf"  # the byte order mark of UTF-8
LONGEST_LINE = 1 << 26  # bytes: a file of other content may have no line feed at all
TEXT, TAGS = "text", "tags"  # kinds of sources: a text; tags such as V;IND;3;SG
TEXT_KINDS = (TEXT, TAGS)  # a source of any other kind names a file
Format = Literal["tsv", "csv", "jsonl", "json", "parquet", "arrow", "tmx", "po", "xml", "hub", "parallel", "folder"]
EXTENSIONS: dict[str, Format] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tmx": "tmx",
    ".po": "po",
    ".pot": "po",
    ".xml": "xml",
}
DROP = "`data.invalid=drop` drops and counts such lines"
DATASET_FILES = ("dataset_dict.json", "state.json")  # of a folder that the datasets library wrote
Parse = Callable[[Any, str, int], Example]


@contextmanager
def open_bytes(path: str) -> Iterator[Any]:
    """Opens a file, local or remote, for its stored bytes."""
    try:
        stream = open_remote(path) if is_remote(path) else open(path, "rb")  # noqa: SIM115 (only the opening may fail)
    except FileNotFoundError:
        raise InputError("no such file", where=path) from None
    except IsADirectoryError:
        remedy = "give a file in it, or --task: some tasks read a folder (see transduce train --help)"
        raise InputError("a directory, not a file", where=path, remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be opened: {error}", where=path) from None
    with stream:
        yield stream


def stored_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Lines numbered from 1, split only at line feeds, without carriage return and byte order mark; "-" is stdin."""
    with open_lines(path) as lines:
        yield from lines


def lines_from(path: str, offset: int, first: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file after so many bytes, numbered from `first`."""
    with open_bytes(path) as stream:
        stream.seek(offset)
        yield from LineReader(stream, path, first - 1)


def line_offsets(path: str, step: int) -> tuple[list[int], int]:
    """Where line 1 and every line `step` further begins, in bytes, and the number of lines."""
    offsets, lines, size, last = [0], 0, 0, b"\n"
    with open_bytes(path) as stream:
        while block := stream.read(1 << 24):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            wanted = np.arange(step - 1 - lines % step, len(ends), step)
            offsets += (size + 1 + ends[wanted]).tolist()
            lines, size, last = lines + len(ends), size + len(block), block[-1:]
    lines += last != b"\n"
    return offsets[: -(-lines // step) or 1], lines


@contextmanager
def open_lines(path: str) -> Iterator[LineReader]:
    """The lines of a file, which may be compressed; of standard input for "-"."""
    if path == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed", remedy="give a file, or lines on standard input")
        yield LineReader(sys.stdin.buffer, "standard input")
        return
    with open_content(path) as stream:
        yield LineReader(stream, path)


@contextmanager
def open_content(path: str) -> Iterator[Any]:
    """Opens a file for its bytes, decompressed by the extension of its name."""
    with open_bytes(path) as stream:
        if path.endswith(".gz"):
            yield gzip.GzipFile(fileobj=stream)
        elif path.endswith(".zst"):
            yield io.BufferedReader(_Zstandard(stream, path), 1 << 17)
        else:
            yield stream


class LineReader(Iterator[tuple[int, bytes]]):
    """Numbered lines of a stream, and whether the next one can be read without waiting for it."""

    def __init__(self, stream: Any, path: str, before: int = 0) -> None:  # before: lines that were skipped
        self._stream = _Arriving(stream) if _may_wait(stream) else stream
        self._path, self._number = path, before

    def __next__(self) -> tuple[int, bytes]:
        try:
            raw: bytes = self._stream.readline(LONGEST_LINE + 1)
        except (EOFError, OSError, zlib.error) as error:
            remedy = "the file is damaged or was not copied completely"
            if is_remote(self._path):
                remedy = f"try again later: the store does not answer, or {remedy}"
            raise InputError(f"cannot be read further: {error}", where=self._place, remedy=remedy) from None
        if not raw:
            raise StopIteration
        if len(raw) > LONGEST_LINE:
            remedy = "is this a text file? Its lines end with a line feed"
            raise InputError(f"a line of more than {LONGEST_LINE:,} bytes", where=self._place, remedy=remedy)
        self._number += 1
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        return self._number, line.removeprefix(_BOM) if self._number == 1 else line

    @property
    def _place(self) -> str:
        return f"{self._path}:{self._number + 1}"

    def ready(self) -> bool:
        """Whether the next line has come. A file has all of its lines; the writer of a pipe may need time."""
        return not isinstance(self._stream, _Arriving) or self._stream.ready()


def _may_wait(stream: Any) -> bool:
    """Whether this is a pipe, a socket or a terminal, rather than a file or a buffer in memory."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode) and not isinstance(stream, gzip.GzipFile)
    except (AttributeError, OSError):  # `io.UnsupportedOperation` is an OSError
        return False


class _Arriving:
    """Lines of a stream whose bytes come over time."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._buffer = stream, bytearray()
        self._searched = 0  # bytes of the buffer without a line feed
        self._ended = False

    def readline(self, limit: int) -> bytes:
        while (end := self._line_end()) == 0 and not self._ended and len(self._buffer) < limit:
            self._read()
        line = bytes(self._buffer[: min(end or len(self._buffer), limit)])
        del self._buffer[: len(line)]
        self._searched = 0
        return line

    def ready(self) -> bool:
        while self._line_end() == 0 and not self._ended:
            if not select.select([self._stream], [], [], 0)[0]:
                return False
            self._read()
        return True

    def _line_end(self) -> int:
        """The length of the first complete line; 0 if there is none yet."""
        end = self._buffer.find(b"\n", self._searched) + 1
        if end == 0:
            self._searched = len(self._buffer)
        return end

    def _read(self) -> None:
        """What is there, after a wait if there is nothing. A read of this size leaves no bytes in the stream itself."""
        select.select([self._stream], [], [])  # the stream may be one that does not wait by itself
        content = self._stream.read1(1 << 16)
        self._buffer += content
        self._ended = not content


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


def corpus_format(corpus: Corpus) -> Format:
    """The file format of a corpus, by the extension of its name."""
    if corpus.path is None:
        return "parallel"
    if corpus.path.startswith(HUB):
        return "hub"
    if is_remote(corpus.path) and names_files(corpus):
        remedy = "copy the folder, or give files of text"
        raise InputError("files that sources name are read from this machine", where=corpus.path, remedy=remedy)
    path = Path(corpus.path)
    if path.is_dir() and any((path / name).is_file() for name in DATASET_FILES):
        return "arrow"
    if names_files(corpus) and path.is_dir():
        return "folder"
    return EXTENSIONS.get(_extension(corpus.path), "tsv")


def _extension(path: str) -> str:
    """The extension of a file name, without that of a compression."""
    return Path(path.removesuffix(".gz").removesuffix(".zst")).suffix.lower()


def is_table(name: str) -> bool:
    """Whether the extension of a name is that of a file with columns."""
    return _extension(name) in (*EXTENSIONS, ".tsv", ".tab")


def names_files(corpus: Corpus) -> bool:
    """Whether a source, or a part of it, names a file."""
    return any(kind not in TEXT_KINDS for kind in corpus.modalities)


def located(folder: Path, name: str) -> str:
    """The path of a file that a line names. LJSpeech names the file `wavs/LJ001-0001.wav` LJ001-0001."""
    wave = folder / "wavs" / f"{name}.wav"
    return str(wave if not Path(name).suffix and wave.is_file() else folder / name)


def decode(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        encoding, more = ("UTF-16", "") if utf16 else ("LATIN1", " if it has another encoding; " + DROP)
        remedy = f"convert the file: iconv -f {encoding} -t UTF-8 FILE > NEW{more}"
        detail = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line"
        raise UnreadableError("invalid UTF-8", detail, remedy) from None
    if "\0" in text:
        raise UnreadableError("NUL character", f"at character {text.index(chr(0)) + 1} of the line")
    return text


def plain_line(raw: bytes, file: str, number: int) -> Example:
    return Example("", decode(raw), {}, file, number)
