"""Files of many arrays (IDX, plain or .gz) in; rows that name them one by one, `FILE#17`, and the arrays out."""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.files import open_bytes
from transduce.data.formats import Parse
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

# Two zero bytes, the kind of numbers, how many axes; then their sizes, 4 bytes each, most significant first.
KINDS = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
LARGEST = 2**32  # bytes of one file, unpacked


def names_arrays(name: str | None) -> bool:
    """`train-labels-idx1-ubyte.gz` and the like."""
    return name is not None and re.search(r"[-.]idx\d?(-ubyte)?(\.gz)?$", name) is not None


def array(named: str) -> np.ndarray:
    """What `FILE#17` stands for, counted from 0."""
    file, _, number = named.rpartition("#")
    if not file or not number.isdecimal():
        raise UnreadableError("no such file", named)
    try:
        whole = read_arrays(file)
    except InputError as error:
        raise UnreadableError("not a readable file of arrays", f"{file}: {error.problem}") from None
    if int(number) >= len(whole):
        raise UnreadableError("no such array", f"{named}: the file has {len(whole):,}")
    found: np.ndarray = whole[int(number)]
    return found


def read_arrays(file: str) -> np.ndarray:
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


def array_rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The name of each array of the source, and the number that stands at its place in the target."""
    source, target = str(corpus.source), str(corpus.target)
    labels, count = read_arrays(target), len(read_arrays(source))
    if labels.ndim != 1 or len(labels) != count:
        problem = f"{count:,} arrays but labels of shape {list(labels.shape)}"
        raise InputError(problem, where=f"{source}, {target}", remedy="name two files that belong together")

    def parse(row: int, file: str, number: int) -> Example:
        return Example(f"{Path(source).name}#{number - 1}", str(row), {}, file, number)

    return enumerate(labels.tolist(), 1), parse
