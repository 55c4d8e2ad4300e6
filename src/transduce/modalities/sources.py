"""Multimodal sources: each part of a source is read by its own modality.

The parts of a source are one text with tabs between them, as in a file. Each part is read into an array. In a batch the
first part is the source, and the other parts are extra sources by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transduce.contracts import Modality, VisualSource
from transduce.data.tokenizers.oov import encode_sources
from transduce.data.tokenizers.tokenizer import Tokenizer
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

    names_files = False

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
