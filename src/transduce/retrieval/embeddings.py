"""Embeddings of text files: streaming to .npy files, and a cache addressed by content."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from transduce import cache
from transduce.data.prepare import cache_folder
from transduce.data.readers.windows import in_windows
from transduce.data.store import checksums
from transduce.errors import InputError
from transduce.inference import Model
from transduce.storage import open_atomic, staged_folder, write_file

_DTYPE = np.dtype("<f4")
_VECTORS = "vectors.npy"


def embed_windows(model: Model, windows: Iterable[list[str]]) -> Iterator[np.ndarray]:
    """Yields embeddings (n D) in blocks of some thousand lines: one row per line, in order."""
    return map(model.embed, windows)


def write_npy(blocks: Iterable[np.ndarray], path: Path) -> tuple[int, int]:
    """Streams rows to a float32 .npy file and returns (rows, width). The file appears only when it is complete."""
    rows, width = 0, 0
    with open_atomic(path) as stream:
        _write_header(stream, rows, width)
        for block in blocks:
            stream.write(np.ascontiguousarray(block, dtype=_DTYPE).tobytes())
            rows, width = rows + len(block), block.shape[1]
        stream.seek(0)
        _write_header(stream, rows, width)  # the same length as before, so no row moves
    return rows, width


_HEADER_BYTES = 128


def _write_header(stream: IO[bytes], rows: int, width: int) -> None:
    """A header of .npy format 1.0 with a fixed length, because the number of rows is known only at the end."""
    description = f"{{'descr': '{_DTYPE.str}', 'fortran_order': False, 'shape': ({rows}, {width})}}"
    magic = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    stream.write(magic + description.ljust(_HEADER_BYTES - 11).encode("ascii") + b"\n")


def cached_embeddings(model: Model, lines: list[str]) -> np.ndarray:
    """The embeddings of the lines (n D), from the cache if the same model embedded the same lines before."""
    folder = cache_folder(model.recipe.data, "vectors") / _cache_key(model, lines)
    if folder.exists():
        try:
            cache.mark_used(folder)
            return _read_vectors(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{folder}: damaged embeddings: {error}: computing them again", stacklevel=2)
    if not lines:
        raise InputError("there are no lines to embed", remedy="give a file with at least one line")
    with staged_folder(folder) as part:
        rows, width = write_npy(embed_windows(model, in_windows(lines)), part / _VECTORS)
        meta = {"names": [f"{rows:,} lines, {width} numbers each"], "checksums": checksums(part, [_VECTORS])}
        write_file(part / cache.META, json.dumps(meta).encode())
    cache.added(folder)
    return _read_vectors(folder)


def _read_vectors(folder: Path) -> np.ndarray:
    expected = json.loads((folder / cache.META).read_bytes())["checksums"]
    if checksums(folder, [_VECTORS]) != expected:
        raise ValueError(f"{_VECTORS} differs from what was written")
    vectors: np.ndarray = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)
    return vectors


def _cache_key(model: Model, lines: list[str]) -> str:
    """A hash of everything that the vectors depend on: model options, vocabulary, weights, text, stamps of files."""
    settings = [
        model.recipe.model.model_dump(mode="json"),
        model.recipe.generation.max_source_length,
        model.source.fingerprint,
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    for line in lines:
        digest.update(line.encode() + b"\n")
        if not model.source_encoding.reads_text:
            for file in filter(Path.is_file, map(Path, line.split("\t"))):
                digest.update(f"{file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
