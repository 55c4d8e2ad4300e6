"""A model and lines of text enter; one vector a line leaves: streamed into a .npy, or kept and found by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from transduce.data.prepare import cache_folder
from transduce.errors import InputError
from transduce.inference import Model, in_chunks
from transduce.storage import TEMPORARY, sync

_ROW = np.dtype("<f4")


def embed_lines(model: Model, lines: Iterable[str]) -> Iterator[np.ndarray]:
    """Vectors (n D) of some thousand lines at a time: one line in, one row out, in order."""
    for chunk in in_chunks(iter(lines)):
        yield model.embed(chunk)


def write_vectors(blocks: Iterable[np.ndarray], path: Path) -> tuple[int, int]:
    """Rows to a float32 .npy as they come; gives (rows, width). The file is whole or absent."""
    part = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    rows, width = 0, 0
    try:
        with open(part, "wb") as stream:
            _write_header(stream, rows, width)
            for block in blocks:
                stream.write(np.ascontiguousarray(block, dtype=_ROW).tobytes())
                rows, width = rows + len(block), block.shape[1]
            stream.seek(0)
            _write_header(stream, rows, width)  # as long as before: numpy leaves room for the numbers to grow
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)
    return rows, width


_HEADER = 128  # bytes


def _write_header(stream: BinaryIO, rows: int, width: int) -> None:
    """The header of the .npy format 1.0, always of the same length: rows are counted when the last was written."""
    facts = f"{{'descr': '{_ROW.str}', 'fortran_order': False, 'shape': ({rows}, {width})}}"
    magic = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    stream.write(magic + facts.ljust(_HEADER - 11).encode("ascii") + b"\n")


def vectors_of(model: Model, lines: list[str]) -> np.ndarray:
    """The vectors of these lines (n D), embedded now or found from an earlier time: the same model, the same lines."""
    place = cache_folder(model.recipe.data) / "vectors" / f"{_name(model, lines)}.npy"
    if not place.exists():
        if not lines:
            raise InputError("there are no lines to embed")
        place.parent.mkdir(parents=True, exist_ok=True)
        write_vectors(embed_lines(model, lines), place)
    try:
        found: np.ndarray = np.load(place, mmap_mode="r", allow_pickle=False)
        if len(found) != len(lines):
            raise ValueError(f"{len(found)} rows for {len(lines)} lines")
    except (OSError, ValueError) as error:
        raise InputError(
            f"damaged vectors: {error}", where=str(place), remedy="delete the file: it is made again"
        ) from None
    return found


def _name(model: Model, lines: list[str]) -> str:
    """What the vectors depend on, as one hash: the weights, the parts, the tokens, and the text itself."""
    facts = [model.recipe.model.model_dump(mode="json"), model.recipe.generation.max_source, model.source.fingerprint]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(model.network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:32]
