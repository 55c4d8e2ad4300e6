"""A pair enters as token counts; it is kept, or dropped and counted by reason with the first place of each."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

Place = tuple[int, int]  # corpus number from 0, line from 1
SMALLEST = 1 << 14  # numbers in a table of pairs met


@dataclass(frozen=True)
class Filters:
    """What a pair must be to be learnt from."""

    min_length: int = 1
    max_length: int = 512
    max_ratio: float | None = None
    drop_duplicates: bool = False

    def reason(
        self, source_length: int, target_length: int, *, blank: bool = False, duplicate: bool = False
    ) -> str | None:
        """Why a pair is dropped, or None. `blank`: one side holds nothing but white space."""
        shorter, longer = sorted((source_length, target_length))
        if (blank or shorter == 0) and self.min_length > 0:
            return "empty"
        if shorter < self.min_length:
            return "too short"
        if longer > self.max_length:
            return "too long"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return "ratio"
        return "duplicate" if duplicate and self.drop_duplicates else None


class PairHashSet:
    """Pairs met so far, by 128 bits of their hash: two different pairs with the same are not to be expected, ever.

    The numbers lie in one table, each at its place or in the next free one: 24 to 48 bytes a pair, in a file without a
    name. So they take no memory that the system could not have back, and are gone when nobody looks at them any more.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._count = folder, 0
        self._table = memoryview(b"").cast("Q")

    def before(self, source: str, target: str) -> bool:
        """Whether this very pair was met before; from now on it was."""
        content = f"{len(source)} {source} {target}".encode()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        first, second = int.from_bytes(digest[:8], "little") or 1, int.from_bytes(digest[8:], "little")  # 0: free
        if 3 * self._count >= len(self._table):  # two numbers a place: two thirds of the places
            self._grow()
        known = self._known(first, second)
        self._count += not known
        return known

    def _grow(self) -> None:
        held = self._table
        self._table = _mapped_table(max(2 * len(held), SMALLEST), self._folder)
        for begin in range(0, len(held), SMALLEST):
            part = held[begin : begin + SMALLEST].tolist()
            for first, second in zip(part[::2], part[1::2], strict=True):
                if first:
                    self._known(first, second)

    def _known(self, first: int, second: int) -> bool:
        table, last = self._table, len(self._table) - 1
        place = 2 * first & last
        while held := table[place]:
            if held == first and table[place + 1] == second:
                return True
            place = (place + 2) & last
        table[place], table[place + 1] = first, second
        return False


def _mapped_table(numbers: int, folder: Path | None) -> memoryview:
    """So many numbers, all 0, in a file that has its blocks from the start: a full disk is told here, and not later."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(8 * numbers)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, 8 * numbers)
        return memoryview(mmap.mmap(file.fileno(), 8 * numbers)).cast("Q")


@dataclass
class FilterReport:
    """How many pairs were kept, how many dropped for which reason, and where each reason was met first."""

    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, Place] = field(default_factory=dict)

    @property
    def read(self) -> int:
        return self.kept + sum(self.dropped.values())

    def drop(self, reason: str, place: Place, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.first.setdefault(reason, place)

    def lines(self, names: list[str], what: str = "pairs") -> list[str]:
        """For people; `names` are the files of the corpora."""
        lines = [f"{self.kept:,} of {self.read:,} {what} kept"]
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            corpus, line = self.first[reason]
            lines.append(f"{count:,} dropped: {reason} (first at {names[corpus]}:{line})")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "dropped": self.dropped, "first": {k: list(v) for k, v in self.first.items()}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        first = {reason: (int(corpus), int(line)) for reason, (corpus, line) in content["first"].items()}
        return cls(int(content["kept"]), {str(k): int(v) for k, v in content["dropped"].items()}, first)
