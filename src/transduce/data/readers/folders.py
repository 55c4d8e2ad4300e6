"""Folders of files, and IDX files of arrays: rows whose sources name files.

    FOLDER/captions.jsonl or metadata.jsonl    {"file_name": "a.png", "caption": "..."}; a list of texts: several pairs
    FOLDER/metadata.csv                        file_name,text; without a header, as in LJSpeech, file name and text
    FOLDER/LABEL/...                           every file below has this label; hidden files are ignored

In a metadata file the source is the field that names a file of the folder, and the target is one of `TARGETS`, unless
the corpus names its columns.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.readers.delimited import csv_rows
from transduce.data.readers.files import Parse, decode, located, open_bytes, stored_lines
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

METADATA = ("captions.jsonl", "metadata.jsonl", "metadata.csv")
SOURCES = ("file_name", "file", "path", "source")
TARGETS = ("captions", "caption", "texts", "text", "transcription", "transcript", "sentence", "label", "target")


def metadata_file(folder: str | Path) -> Path | None:
    """The metadata file of a folder, where it has one."""
    return next((Path(folder) / name for name in METADATA if (Path(folder) / name).is_file()), None)


def folder_rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """Numbered raw rows, and a parser for one of them; sources are paths relative to the folder."""
    folder = Path(str(corpus.path))
    given = corpus.columns if "columns" in corpus.model_fields_set else None
    if (path := metadata_file(folder)) is not None:
        return _metadata_rows(path, given), _metadata_pair(folder, given)
    return enumerate(labelled_files(folder), 1), lambda row, file, number: Example(row[0], row[1], {}, file, number)


def labelled_files(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of each label in order: path relative to the folder, and label."""
    labels = sorted(place.name for place in folder.iterdir() if place.is_dir() and not place.name.startswith("."))
    if not labels:
        remedy = f"put {METADATA[0]} into it, or a folder of files for each label"
        raise InputError("this folder has neither labels nor a metadata file", where=str(folder), remedy=remedy)
    for label in labels:
        for place, below, files in os.walk(folder / label):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for name in sorted(name for name in files if not name.startswith(".")):
                yield str((Path(place) / name).relative_to(folder)), label


def _metadata_rows(path: Path, fields: tuple[str, ...] | None) -> Iterator[tuple[int, tuple[bytes, int]]]:
    """Each line once per text; an unreadable line comes once, and is reported when it is parsed."""
    for number, raw in _table_rows(path) if path.suffix == ".csv" else stored_lines(str(path)):
        try:
            content = json.loads(raw)
            texts = content[_target(content, fields)]
        except (ValueError, KeyError, TypeError, RecursionError, UnreadableError):
            texts = ""
        for place in range(len(texts) if isinstance(texts, list) and texts else 1):
            yield number, (raw, place)


def _table_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a CSV file as JSON objects, with the names of its header, or else of LJSpeech."""
    names: list[str] | None = None
    for number, cells in csv_rows(str(path)):
        if names is None:
            names = [cell.strip() for cell in cells]
            if set(names) & set(SOURCES):
                continue
            names = [SOURCES[0], "text"]
        content = json.dumps(dict(zip(names, cells, strict=False)), ensure_ascii=False)
        yield number, content.encode("utf-8", "surrogateescape")


def _metadata_pair(folder: Path, fields: tuple[str, ...] | None) -> Parse:
    def parse(row: tuple[bytes, int], file: str, number: int) -> Example:
        raw, place = row
        try:
            content = json.loads(decode(raw))
        except (ValueError, RecursionError) as error:
            raise UnreadableError("malformed JSON", str(error), "every line holds one JSON object") from None
        if not isinstance(content, dict):
            raise UnreadableError("malformed JSON", "not an object", "every line holds one JSON object")
        names = fields[:-1] if fields else (_source(folder, content),)
        texts = content.get(_target(content, fields))
        text = texts[place] if isinstance(texts, list) and texts else texts
        parts = [content.get(name) for name in names]
        for name, value in [*zip(names, parts, strict=True), (_target(content, fields), text)]:
            if not isinstance(value, str):
                raise UnreadableError("not text", f"field {name!r} holds {json.dumps(value)[:40]}")
        return Example("\t".join(map(str, parts)), str(text), {}, file, number)

    return parse


def _source(folder: Path, content: dict[str, Any]) -> str:
    texts = {name: value for name, value in content.items() if isinstance(value, str)}
    names = [name for name, value in texts.items() if Path(located(folder, value)).is_file()]
    known = [name for name in (*SOURCES, *content) if name in names]
    known += [name for name in SOURCES if name in content]  # its file is missing, which is reported when it is read
    if not known:
        raise UnreadableError("missing field", "no field names a file of the folder", f"known: {', '.join(SOURCES)}")
    return known[0]


def _target(content: dict[str, Any], fields: tuple[str, ...] | None) -> str:
    names = fields[-1:] if fields else TARGETS
    found = next((name for name in names if name in content), None)
    if found is None:
        raise UnreadableError("missing field", repr(names[0]), f"known: {', '.join(names)}")
    return found


# IDX header: two zero bytes, data type, number of axes; then the size of each axis in 4 bytes, big-endian.
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
MAX_BYTES = 2**32  # of one file, decompressed
BLOCK = 1 << 24


def is_idx(name: str | None) -> bool:
    """Whether this is the name of an IDX file, such as `train-labels-idx1-ubyte.gz`."""
    return name is not None and re.search(r"[-.]idx\d?(-ubyte)?(\.gz)?$", name) is not None


def idx_array(source: str) -> np.ndarray:
    """The array that `FILE#17` names, counted from 0."""
    file, _, number = source.rpartition("#")
    if not file or not number.isdecimal():
        raise UnreadableError("no such file", source)
    try:
        arrays = read_idx(file)
    except InputError as error:
        raise UnreadableError("not a readable file of arrays", f"{file}: {error.problem}") from None
    if int(number) >= len(arrays):
        raise UnreadableError("no such array", f"{source}: the file has {len(arrays):,}")
    array: np.ndarray = arrays[int(number)]
    return array


def read_idx(file: str) -> np.ndarray:
    """All arrays of a file, read once per process unless the file changes."""
    try:
        stamp = Path(file).stat()
    except OSError:
        raise InputError("no such file", where=file) from None
    return _read_idx(file, stamp.st_size, stamp.st_mtime_ns)


def _read_up_to(stream: Any, size: int) -> bytes:
    """So many bytes, or all that there are. To read them at once would take memory for those that are not there."""
    blocks: list[bytes] = []
    while size and (block := stream.read(min(size, BLOCK))):
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)


@lru_cache(maxsize=4)
def _read_idx(file: str, size: int, modified: int) -> np.ndarray:
    with open_bytes(file) as stream:
        content = gzip.GzipFile(fileobj=stream) if file.endswith(".gz") else stream
        try:
            head = content.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_TYPES or not 1 <= head[3] <= 8:
                raise InputError(
                    "not an IDX file", where=file, remedy="an IDX file begins with its data type and sizes"
                )
            sizes = struct.unpack(f">{head[3]}I", content.read(4 * head[3]))
            kind = np.dtype(IDX_TYPES[head[2]])
            expected = math.prod(sizes) * kind.itemsize
            if expected > MAX_BYTES:
                raise InputError(f"it would need {expected:,} bytes", where=file, remedy="split it into several files")
            rest = _read_up_to(content, expected + 1)
        except (OSError, EOFError, zlib.error, struct.error) as error:
            raise InputError(f"cannot be read: {error}", where=file, remedy="fetch it again") from None
    if len(rest) != expected:
        problem = f"{len(rest):,} bytes of numbers" if len(rest) < expected else "more numbers"
        raise InputError(f"{problem}, where its sizes say {expected:,}", where=file, remedy="fetch it again")
    return np.frombuffer(rest, kind).reshape(sizes)


def idx_rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The name of each array of the source, and the label at the same index of the target."""
    source, target = str(corpus.source), str(corpus.target)
    labels, count = read_idx(target), len(read_idx(source))
    if labels.ndim != 1 or len(labels) != count:
        problem = f"{count:,} arrays but labels of shape {list(labels.shape)}"
        raise InputError(problem, where=f"{source}, {target}", remedy="give two files that belong together")

    def parse(row: int, file: str, number: int) -> Example:
        return Example(f"{Path(source).name}#{number - 1}", str(row), {}, file, number)

    return enumerate(labels.tolist(), 1), parse
