"""Storage of multimodal sources: the arrays read from files, each different file once.

part.NAME.data        the arrays of all files, end to end      part.NAME.shape   the shape of each array
part.NAME.data.ends   the end offset of each array             part.NAME.item    the array of each pair
source.rows           the number of rows of each pair in a batch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from transduce.contracts import Modality
from transduce.modalities.sources import ModalitySource, SourceItem


def file_names(parts: Sequence[str]) -> Iterator[str]:
    for name in parts:
        yield from (f"part.{name}.{content}" for content in ("data", "data.ends", "shape", "item"))
    if parts:
        yield "source.rows"


class ItemWriter:
    """Appends the sources of pairs; a file that was read before is neither read nor written again."""

    def __init__(self, source: ModalitySource, files: Mapping[str, BinaryIO]) -> None:
        self._source, self._files = source, files
        self._known: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in source.parts}  # -> item, rows
        self._ends = dict.fromkeys(source.parts, 0)
        self.dtypes: dict[str, tuple[str, int]] = {}  # dtype and number of axes of the arrays of a part

    def read(self, text: str) -> int:
        """Reads and stores the new files of a source; returns its number of rows in a batch.

        Raises an UnreadableError where a file cannot be read.
        """
        parts = zip(self._source.parts.items(), self._source.split(text), strict=True)
        return sum(self._read_part(name, modality, part) for (name, modality), part in parts)

    def _read_part(self, name: str, modality: Modality, part: str) -> int:
        known = self._known[name]
        if part not in known:
            array = np.ascontiguousarray(modality.read(part))
            self.dtypes.setdefault(name, (array.dtype.str, array.ndim))
            if (array.dtype.str, array.ndim) != self.dtypes[name]:
                raise ValueError(f"{name}: {array.dtype} of {array.ndim} axes after {self.dtypes[name]}")
            self._ends[name] += array.size
            self._files[f"part.{name}.data"].write(array.tobytes())
            self._files[f"part.{name}.data.ends"].write(np.int64(self._ends[name]).tobytes())
            self._files[f"part.{name}.shape"].write(np.array(array.shape, np.int64).tobytes())
            known[part] = len(known), modality.length(array)
        return known[part][1]

    def append(self, texts: Sequence[str]) -> None:
        """Makes these sources, all of them read before, the sources of the next pairs."""
        rows = np.zeros(len(texts), np.int64)
        for column, (name, known) in enumerate(self._known.items()):
            found = [known[self._source.split(text)[column]] for text in texts]
            self._files[f"part.{name}.item"].write(np.array([item for item, _ in found], np.int64).tobytes())
            rows += np.array([count for _, count in found], np.int64)
        self._files["source.rows"].write(rows.tobytes())


class ItemStore:
    """The sources of a finished store."""

    def __init__(self, folder: Path, source: ModalitySource, dtypes: Mapping[str, tuple[str, int]]) -> None:
        self.source = source
        self._data, self._ends, self._shape, self._item = {}, {}, {}, {}
        for name in source.parts:
            dtype, axes = dtypes[name]
            self._data[name] = map_array(folder / f"part.{name}.data", dtype)
            self._ends[name] = map_array(folder / f"part.{name}.data.ends", "<i8")
            self._shape[name] = map_array(folder / f"part.{name}.shape", "<i8").reshape(-1, axes)
            self._item[name] = map_array(folder / f"part.{name}.item", "<i8")
        self.rows = map_array(folder / "source.rows", "<i8")

    def items(self, rows: Sequence[int]) -> list[SourceItem]:
        """The sources of these pairs."""
        return [self.source.item([self._array(name, row) for name in self.source.parts]) for row in rows]

    def _array(self, name: str, row: int) -> np.ndarray:
        item = int(self._item[name][row])
        ends = self._ends[name]
        begin, end = int(ends[item - 1]) if item else 0, int(ends[item])
        array: np.ndarray = self._data[name][begin:end].reshape(self._shape[name][item])
        return array


def map_array(path: Path, dtype: str | np.dtype) -> np.ndarray:
    """A memory-mapped array. An empty file cannot be mapped; slices of np.memmap itself are slow."""
    return np.asarray(np.memmap(path, np.dtype(dtype), "r")) if path.stat().st_size else np.zeros(0, dtype)
