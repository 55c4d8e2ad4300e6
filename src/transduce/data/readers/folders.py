"""A folder in, rows that name its files out: those that a list tells of, or those of a folder for each label.

    FOLDER/captions.jsonl or metadata.jsonl    {"file_name": "a.png", "caption": "..."}, or a list of texts: a pair each
    FOLDER/LABEL/...                           every file below is one of this label; hidden files are passed over

In a list the source is the field that names a file of the folder, and the target one of `TARGETS`, unless the corpus
says which fields they are.
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

from transduce.data.readers.files import open_bytes, stored_lines
from transduce.data.readers.formats import Parse, decode
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

LISTS = ("captions.jsonl", "metadata.jsonl")
SOURCES = ("file_name", "file", "path", "source")
TARGETS = ("captions", "caption", "texts", "text", "transcription", "label", "target")


def metadata_file(folder: str | Path) -> Path | None:
    """The list of a folder, where it has one."""
    return next((Path(folder) / name for name in LISTS if (Path(folder) / name).is_file()), None)


def folder_rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """Numbered raw rows, and how one of them becomes an example whose source is named from the folder on."""
    folder = Path(str(corpus.path))
    given = corpus.columns if "columns" in corpus.model_fields_set else None
    if (path := metadata_file(folder)) is not None:
        return _told(path, given), _pair_of_list(folder, given)
    return enumerate(labelled_files(folder), 1), lambda row, file, number: Example(row[0], row[1], {}, file, number)


def labelled_files(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of each label in order: a name from the folder on, and the label."""
    labels = sorted(place.name for place in folder.iterdir() if place.is_dir() and not place.name.startswith("."))
    if not labels:
        remedy = f"put {LISTS[0]} into it, or a folder of files for each label"
        raise InputError("this folder tells nothing of what its files are", where=str(folder), remedy=remedy)
    for label in labels:
        for place, below, files in os.walk(folder / label):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for name in sorted(name for name in files if not name.startswith(".")):
                yield str((Path(place) / name).relative_to(folder)), label


def _told(path: Path, fields: tuple[str, ...] | None) -> Iterator[tuple[int, tuple[bytes, int]]]:
    """Each line as often as it has texts; one that cannot be read comes once, and is told of where it is parsed."""
    for number, raw in stored_lines(str(path)):
        try:
            content = json.loads(raw)
            texts = content[_target(content, fields)]
        except (ValueError, KeyError, TypeError, RecursionError, UnreadableError):
            texts = ""
        for place in range(len(texts) if isinstance(texts, list) and texts else 1):
            yield number, (raw, place)


def _pair_of_list(folder: Path, fields: tuple[str, ...] | None) -> Parse:
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
    names = [name for name, value in content.items() if isinstance(value, str) and (folder / value).is_file()]
    known = [name for name in (*SOURCES, *content) if name in names]
    known += [name for name in SOURCES if name in content]  # its file is missing, which is told where it is read
    if not known:
        raise UnreadableError("missing field", "none names a file of the folder", f"known: {', '.join(SOURCES)}")
    return known[0]


def _target(content: dict[str, Any], fields: tuple[str, ...] | None) -> str:
    names = fields[-1:] if fields else TARGETS
    found = next((name for name in names if name in content), None)
    if found is None:
        raise UnreadableError("missing field", repr(names[0]), f"known: {', '.join(names)}")
    return found


# Two zero bytes, the kind of numbers, how many axes; then their sizes, 4 bytes each, most significant first.
KINDS = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
LARGEST = 2**32  # bytes of one file, unpacked


def is_idx(name: str | None) -> bool:
    """`train-labels-idx1-ubyte.gz` and the like."""
    return name is not None and re.search(r"[-.]idx\d?(-ubyte)?(\.gz)?$", name) is not None


def idx_array(named: str) -> np.ndarray:
    """What `FILE#17` stands for, counted from 0."""
    file, _, number = named.rpartition("#")
    if not file or not number.isdecimal():
        raise UnreadableError("no such file", named)
    try:
        whole = read_idx(file)
    except InputError as error:
        raise UnreadableError("not a readable file of arrays", f"{file}: {error.problem}") from None
    if int(number) >= len(whole):
        raise UnreadableError("no such array", f"{named}: the file has {len(whole):,}")
    found: np.ndarray = whole[int(number)]
    return found


def read_idx(file: str) -> np.ndarray:
    """All of a file, read once in a process as long as the file stays as it is."""
    try:
        stamp = Path(file).stat()
    except OSError:
        raise InputError("no such file", where=file) from None
    return _read(file, stamp.st_size, stamp.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: str, size: int, changed: int) -> np.ndarray:
    with open_bytes(file) as stream:
        content = gzip.GzipFile(fileobj=stream) if file.endswith(".gz") else stream
        try:
            head = content.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in KINDS or not 1 <= head[3] <= 8:
                raise InputError("not an IDX file", where=file, remedy="it begins with its kind and its sizes")
            sizes = struct.unpack(f">{head[3]}I", content.read(4 * head[3]))
            kind = np.dtype(KINDS[head[2]])
            wanted = math.prod(sizes) * kind.itemsize
            if wanted > LARGEST:
                raise InputError(f"it would take {wanted:,} bytes", where=file, remedy="cut it into several files")
            rest = content.read(wanted + 1)
        except (OSError, EOFError, zlib.error, struct.error) as error:
            raise InputError(f"cannot be read: {error}", where=file, remedy="fetch it again") from None
    if len(rest) != wanted:
        problem = f"{len(rest):,} bytes of numbers" if len(rest) < wanted else "more numbers"
        raise InputError(f"{problem}, where its sizes say {wanted:,}", where=file, remedy="fetch it again")
    return np.frombuffer(rest, kind).reshape(sizes)


def idx_rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The name of each array of the source, and the number that stands at its place in the target."""
    source, target = str(corpus.source), str(corpus.target)
    labels, count = read_idx(target), len(read_idx(source))
    if labels.ndim != 1 or len(labels) != count:
        problem = f"{count:,} arrays but labels of shape {list(labels.shape)}"
        raise InputError(problem, where=f"{source}, {target}", remedy="name two files that belong together")

    def parse(row: int, file: str, number: int) -> Example:
        return Example(f"{Path(source).name}#{number - 1}", str(row), {}, file, number)

    return enumerate(labels.tolist(), 1), parse
