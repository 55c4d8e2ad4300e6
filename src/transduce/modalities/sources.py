"""Sources that are more than one text in, the sources of a batch out: each part is read by its own modality.

The parts of a source stand in one text, with a tab between them, as they do in a file. What is kept of each part is
an array; a batch has the first part as its source, and the others beside it by name.
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
    """What is kept of each part of one source, and how many rows all of them have in a batch."""

    parts: tuple[np.ndarray, ...]
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.rows)


class TextModality(Modality):
    """a text, in the tokens of the source"""

    names_files = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def read(self, named: str) -> np.ndarray:
        return np.array(encode_sources(self._tokenizer, [named])[0], np.uint32)

    def length(self, kept: np.ndarray) -> int:
        return len(kept) + 1  # </s>

    def padded(self, kept: Sequence[np.ndarray], draws: Sequence[np.random.Generator] | None = None) -> Padded:
        return Padded.from_rows([[*row.tolist(), EOS] for row in kept])

    def label(self, kept: np.ndarray, grid: Sequence[int]) -> list[str]:
        return [*(self._tokenizer.piece(number) for number in kept.tolist()), "</s>"]


@dataclass(frozen=True)
class ModalitySource:
    """The named parts of a source, in the order of their columns."""

    parts: Mapping[str, Modality]
    fingerprint: str  # of all that decides what is kept

    @classmethod
    def of(cls, parts: Mapping[str, Modality], facts: object) -> ModalitySource:
        return cls(parts, hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest())

    def split(self, text: str) -> list[str]:
        """The parts of a source; the last may hold tabs of its own where it is a text."""
        named = text.split("\t", len(self.parts) - 1)
        if len(named) < len(self.parts):
            wanted = ", ".join(self.parts)
            raise UnreadableError("missing column", f"{len(named)} of {len(self.parts)} sources ({wanted})")
        return named

    def read(self, text: str) -> SourceItem:
        return self.item([part.read(one) for part, one in zip(self.parts.values(), self.split(text), strict=True)])

    def item(self, kept: Sequence[np.ndarray]) -> SourceItem:
        rows = tuple(part.length(one) for part, one in zip(self.parts.values(), kept, strict=True))
        return SourceItem(tuple(kept), rows)

    def read_all(self, texts: Sequence[str]) -> list[SourceItem]:
        items = []
        for text in texts:
            try:
                items.append(self.read(text))
            except UnreadableError as bad:
                raise InputError(bad.problem, where=text, remedy=bad.remedy) from None
        return items

    def onto(
        self, batch: Batch, items: Sequence[SourceItem], draws: Sequence[np.random.Generator] | None = None
    ) -> Batch:
        """A batch with these as its sources."""
        sides = {
            name: part.padded([item.parts[place] for item in items], draws)
            for place, (name, part) in enumerate(self.parts.items())
        }
        first, *others = sides
        return replace(batch, source=sides[first], extra={**batch.extra, **{name: sides[name] for name in others}})

    def labels(self, item: SourceItem, grids: Sequence[Sequence[int]], leading: Sequence[int]) -> list[str]:
        """A name for each row of the memory."""
        parts = zip(self.parts.values(), item.parts, grids, leading, strict=True)
        return [label for part, kept, grid, more in parts for label in (*["<cls>"] * more, *part.label(kept, grid))]

    def scenes(self, item: SourceItem, grids: Sequence[Sequence[int]], leading: Sequence[int]) -> list[VisualSource]:
        """What a person sees of it."""
        found, begin = [], 0
        for part, kept, grid, more in zip(self.parts.values(), item.parts, grids, leading, strict=True):
            begin += more
            scene = part.scene(kept, grid)
            found += [] if scene is None else [replace(scene, begin=begin)]
            begin += int(np.prod(grid))
        return found
