"""A pair enters as token counts; it is kept, or dropped and counted by reason with the first place of each."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

Place = tuple[int, int]  # corpus number from 0, line from 1


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


class Seen:
    """Pairs met so far, by 64 bits of their hash: one false alarm is expected among some six thousand million.

    The numbers lie in one table, each at its place or in the next free one: 12 to 24 bytes a pair, where a set of
    Python's own numbers takes four times as much.
    """

    def __init__(self) -> None:
        self._table, self._count = array("Q", bytes(8 * 1024)), 0  # 0: free

    def before(self, source: str, target: str) -> bool:
        """Whether this very pair was met before; from now on it was."""
        content = f"{len(source)} {source} {target}".encode()
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        if self._known(number or 1):
            return True
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            held, self._table = self._table, array("Q", bytes(16 * len(self._table)))
            for old in filter(None, held):
                self._known(old)
        return False

    def _known(self, number: int) -> bool:
        table, last = self._table, len(self._table) - 1
        place = number & last
        while held := table[place]:
            if held == number:
                return True
            place = (place + 1) & last
        table[place] = number
        return False


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
