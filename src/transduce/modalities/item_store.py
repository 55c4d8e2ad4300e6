"""What is kept of the parts of sources in, files of a store out, and back: each different file is kept once.

part.NAME.data    what is kept of all files, end to end      part.NAME.shape   the shape of each
part.NAME.data.ends   where each ends                        part.NAME.item    which of them each pair has
source.rows       rows of each pair in a batch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from transduce.modalities.sources import ModalitySource, SourceItem


def file_names(parts: Sequence[str]) -> Iterator[str]:
    for name in parts:
        yield from (f"part.{name}.{what}" for what in ("data", "data.ends", "shape", "item"))
    if parts:
        yield "source.rows"


class ItemWriter:
    """Appends the sources of pairs; a file that was met before is neither read nor written again."""

    def __init__(self, perceived: ModalitySource, files: Mapping[str, BinaryIO]) -> None:
        self._perceived, self._files = perceived, files
        self._known: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in perceived.parts}  # -> number, rows
        self._ends = dict.fromkeys(perceived.parts, 0)
        self.kinds: dict[str, tuple[str, int]] = {}  # numbers of a part, and how many axes they have

    def rows(self, text: str) -> int:
        """Reads what is new of a source, and tells how many rows it has; an UnreadableError says why it cannot."""
        parts = zip(self._perceived.parts.items(), self._perceived.split(text), strict=True)
        return sum(self._meet(name, part.read, part.length, named) for (name, part), named in parts)

    def _meet(self, name: str, read: Any, length: Any, named: str) -> int:
        known = self._known[name]
        if named not in known:
            kept = np.ascontiguousarray(read(named))
            self.kinds.setdefault(name, (kept.dtype.str, kept.ndim))
            if (kept.dtype.str, kept.ndim) != self.kinds[name]:
                raise ValueError(f"{name} kept {kept.dtype} of {kept.ndim} axes, and before {self.kinds[name]}")
            self._ends[name] += kept.size
            self._files[f"part.{name}.data"].write(kept.tobytes())
            self._files[f"part.{name}.data.ends"].write(np.int64(self._ends[name]).tobytes())
            self._files[f"part.{name}.shape"].write(np.array(kept.shape, np.int64).tobytes())
            known[named] = len(known), length(kept)
        return known[named][1]

    def keep(self, texts: Sequence[str]) -> None:
        """These sources, all of them met, are those of the next pairs."""
        rows = np.zeros(len(texts), np.int64)
        for place, (name, known) in enumerate(self._known.items()):
            found = [known[self._perceived.split(text)[place]] for text in texts]
            self._files[f"part.{name}.item"].write(np.array([number for number, _ in found], np.int64).tobytes())
            rows += np.array([count for _, count in found], np.int64)
        self._files["source.rows"].write(rows.tobytes())


class ItemStore:
    """The sources of a finished store."""

    def __init__(self, folder: Path, perceived: ModalitySource, kinds: Mapping[str, tuple[str, int]]) -> None:
        self.perceived = perceived
        self._data, self._ends, self._shape, self._item = {}, {}, {}, {}
        for name in perceived.parts:
            kind, axes = kinds[name]
            self._data[name] = _mapped(folder / f"part.{name}.data", kind)
            self._ends[name] = _mapped(folder / f"part.{name}.data.ends", "<i8")
            self._shape[name] = _mapped(folder / f"part.{name}.shape", "<i8").reshape(-1, axes)
            self._item[name] = _mapped(folder / f"part.{name}.item", "<i8")
        self.rows = _mapped(folder / "source.rows", "<i8")

    def of(self, rows: Sequence[int]) -> list[SourceItem]:
        return [self.perceived.item([self._kept(name, row) for name in self.perceived.parts]) for row in rows]

    def _kept(self, name: str, row: int) -> np.ndarray:
        number = int(self._item[name][row])
        ends = self._ends[name]
        begin, end = int(ends[number - 1]) if number else 0, int(ends[number])
        kept: np.ndarray = self._data[name][begin:end].reshape(self._shape[name][number])
        return kept


def _mapped(path: Path, kind: str) -> np.ndarray:
    # An empty file cannot be mapped. Plain arrays over the mapping: np.memmap's own slices are slow.
    return np.asarray(np.memmap(path, np.dtype(kind), "r")) if path.stat().st_size else np.zeros(0, kind)
