"""Multimodal sources, each part read by its own modality, and the storage of their arrays.

The parts of a source are one text with tabs between them, as in a file. Each part is read into an array. In a batch the
first part is the source, and the other parts are extra sources by name. A store has these files:

    part.NAME.data        the arrays of all files, end to end      part.NAME.shape   the shape of each array
    part.NAME.data.ends   the end offset of each array             part.NAME.item    the array of each pair
    source.rows           the number of rows of each pair in a batch

Each different file is read and stored once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from transduce.contracts import Modality, VisualSource
from transduce.data.tokenizers.tokenizer import Tokenizer, encode_sources
from transduce.data.tokenizers.vocabulary import TAG_MARK
from transduce.errors import InputError, UnreadableError
from transduce.flow import EOS, Batch, Padded


@dataclass(frozen=True)
class SourceItem:
    """The arrays of the parts of one source, and the number of rows of each in a batch."""

    parts: tuple[np.ndarray, ...]
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.rows)


class TextModality(Modality):
    """a text, in tokens of the source vocabulary"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def read(self, source: str) -> np.ndarray:
        return np.array(encode_sources(self._tokenizer, [source])[0], np.uint32)

    def length(self, array: np.ndarray) -> int:
        return len(array) + 1  # </s>

    def collate(self, arrays: Sequence[np.ndarray], rngs: Sequence[np.random.Generator] | None = None) -> Padded:
        return Padded.from_rows([[*array.tolist(), EOS] for array in arrays])

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return [*(self._tokenizer.piece(number) for number in array.tolist()), "</s>"]


class TagsModality(TextModality):
    """morphological features such as V;IND;3;SG: each tag is one token of the source vocabulary"""

    def read(self, source: str) -> np.ndarray:
        return np.array(self._tokenizer.encode_tags(source), np.uint32)

    def position_labels(self, array: np.ndarray, grid: Sequence[int]) -> list[str]:
        return [label.removeprefix(TAG_MARK) for label in super().position_labels(array, grid)]


@dataclass(frozen=True)
class ModalitySource:
    """The modality of each part of a source by its name, in the order of the columns."""

    parts: Mapping[str, Modality]
    fingerprint: str  # hash of everything that determines the stored arrays

    @classmethod
    def of(cls, parts: Mapping[str, Modality], facts: object) -> ModalitySource:
        return cls(parts, hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest())

    def split(self, text: str) -> list[str]:
        """The parts of a source; the last part may contain tabs where it is a text."""
        parts = text.split("\t", len(self.parts) - 1)
        if len(parts) < len(self.parts):
            names = ", ".join(self.parts)
            raise UnreadableError("missing column", f"{len(parts)} of {len(self.parts)} sources ({names})")
        return parts

    def read(self, text: str) -> SourceItem:
        parts = zip(self.parts.values(), self.split(text), strict=True)
        return self.item([modality.read(part) for modality, part in parts])

    def item(self, arrays: Sequence[np.ndarray]) -> SourceItem:
        rows = tuple(modality.length(array) for modality, array in zip(self.parts.values(), arrays, strict=True))
        return SourceItem(tuple(arrays), rows)

    def read_all(self, texts: Sequence[str]) -> list[SourceItem]:
        items = []
        for text in texts:
            try:
                items.append(self.read(text))
            except UnreadableError as bad:
                raise InputError(bad.problem, where=text, remedy=bad.remedy) from None
        return items

    def add_to(
        self, batch: Batch, items: Sequence[SourceItem], rngs: Sequence[np.random.Generator] | None = None
    ) -> Batch:
        """The batch with these items as its sources, augmented where there are random generators."""
        collated = {
            name: modality.collate([item.parts[column] for item in items], rngs)
            for column, (name, modality) in enumerate(self.parts.items())
        }
        first, *others = collated
        extra = {**batch.extra, **{name: collated[name] for name in others}}
        return replace(batch, source=collated[first], extra=extra)

    def position_labels(self, item: SourceItem, grids: Sequence[Sequence[int]], leading: Sequence[int]) -> list[str]:
        """A label for each row of the memory."""
        parts = zip(self.parts.values(), item.parts, grids, leading, strict=True)
        return [
            label
            for modality, array, grid, count in parts
            for label in (*["<cls>"] * count, *modality.position_labels(array, grid))
        ]

    def visualise(self, item: SourceItem, grids: Sequence[Sequence[int]], leading: Sequence[int]) -> list[VisualSource]:
        """The pixels of the parts that can be displayed."""
        visuals, begin = [], 0
        for modality, array, grid, count in zip(self.parts.values(), item.parts, grids, leading, strict=True):
            begin += count
            visual = modality.visualise(array, grid)
            visuals += [] if visual is None else [replace(visual, begin=begin)]
            begin += int(np.prod(grid))
        return visuals


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
