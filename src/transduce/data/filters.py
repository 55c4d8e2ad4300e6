"""Filters by length, ratio, duplicates, copies and encoding; a report of dropped pairs; leakage of test examples."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from transduce.data.readers.corpus import Invalid, read_corpus
from transduce.data.readers.files import TEXT, TEXT_KINDS
from transduce.flow import Example
from transduce.recipe import Corpora, DataRecipe
from transduce.storage import WriteError

Place = tuple[int, int]  # corpus number from 0, line from 1
# The replacement character, C1 controls and noncharacters.
_DAMAGED = re.compile("[\ufffd\x80-\x84\x86-\x9f\ufdd0-\ufdef\ufffe\uffff]")
MIN_TABLE = 1 << 14  # numbers in the smallest hash table


@dataclass(frozen=True)
class Filters:
    """Conditions on a training pair."""

    min_length: int = 1
    max_length: int = 512
    max_ratio: float | None = None
    drop_duplicates: bool = False

    def reason(
        self, source_length: int, target_length: int, *, blank: bool = False, duplicate: bool = False
    ) -> str | None:
        """Why a pair is dropped, or None. `blank`: one side consists of white space."""
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


@dataclass(frozen=True)
class TextFilters:
    """Conditions on the texts of a pair, before any tokenisation; lengths are in characters."""

    min_length: int = 1
    max_length: int = 2000
    max_ratio: float | None = None
    copies: bool = True  # False: source and target are not the same text
    bad_encoding: bool = True  # False: no text is damaged by a wrong encoding

    def reason(self, sides: Sequence[str]) -> str | None:
        """Why a pair, or a text without a source, is dropped; None: it is kept."""
        shorter, longer = min(map(len, sides)), max(map(len, sides))
        if not all(side.strip() for side in sides):
            return "empty" if self.min_length else None
        if shorter < self.min_length:
            return "too short"
        if longer > self.max_length:
            return "too long"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return "ratio"
        if not self.copies and len(sides) > 1 and sides[0].strip().lower() == sides[-1].strip().lower():
            return "copy"
        return "bad encoding" if not self.bad_encoding and any(map(is_badly_encoded, sides)) else None


def is_badly_encoded(text: str) -> bool:
    """Whether a text has characters that no text has, or words whose UTF-8 was read as Windows-1252 (`fÃ¼r`)."""
    if text.isascii():
        return False
    return _DAMAGED.search(text) is not None or any(_is_mojibake(word) for word in text.split() if not word.isascii())


def _is_mojibake(word: str) -> bool:
    try:
        word.encode("cp1252").decode("utf-8")
    except UnicodeError:
        return False
    return True


class PairHashSet:
    """A set of pairs by 128-bit hashes; collisions are negligible.

    The hashes are in one open-addressing table, 24 to 48 bytes per pair, in an unlinked temporary file: the system can
    reclaim its memory, and the file disappears with the process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._count = folder, 0
        self._table = memoryview(b"").cast("Q")

    def add(self, source: str, target: str) -> bool:
        """Adds a pair; returns whether it is new."""
        digest = pair_digest(source, target)
        first, second = int.from_bytes(digest[:8], "little") or 1, int.from_bytes(digest[8:], "little")  # 0: free
        if 3 * self._count >= len(self._table):  # two numbers per entry: at most two thirds are occupied
            self._grow()
        new = self._insert(first, second)
        self._count += new
        return new

    def _grow(self) -> None:
        old = self._table
        self._table = _mapped_table(max(2 * len(old), MIN_TABLE), self._folder)
        for begin in range(0, len(old), MIN_TABLE):
            part = old[begin : begin + MIN_TABLE].tolist()
            for first, second in zip(part[::2], part[1::2], strict=True):
                if first:
                    self._insert(first, second)

    def _insert(self, first: int, second: int) -> bool:
        table, last = self._table, len(self._table) - 1
        index = 2 * first & last
        while occupied := table[index]:
            if occupied == first and table[index + 1] == second:
                return False
            index = (index + 2) & last
        table[index], table[index + 1] = first, second
        return True


def pair_digest(source: str, target: str) -> bytes:
    """128 bits."""
    return hashlib.blake2b(f"{len(source)} {source} {target}".encode(), digest_size=16).digest()


def _mapped_table(numbers: int, folder: Path | None) -> memoryview:
    """A table of zeros in a file whose blocks are allocated at once: a full disk is reported here and not later."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(8 * numbers)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, 8 * numbers)
            return memoryview(mmap.mmap(file.fileno(), 8 * numbers)).cast("Q")
    except OSError as error:
        raise WriteError(str(folder or tempfile.gettempdir()), error) from None


@dataclass
class FilterReport:
    """The number of pairs kept, the number dropped for each reason, and the first place of each reason."""

    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, Place] = field(default_factory=dict)

    @property
    def read(self) -> int:
        return self.kept + sum(self.dropped.values())

    def drop(self, reason: str, place: Place, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.first.setdefault(reason, place)

    def lines(self, names: list[str], unit: str = "pairs") -> list[str]:
        """The report as text; `names` are the files of the corpora."""
        lines = [f"{self.kept:,} of {self.read:,} {unit} kept"]
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


@dataclass(frozen=True)
class Leakage:
    """Counts of test examples: all of them, and those whose pair, source or target is in the training data, exactly."""

    examples: int
    pairs: int
    sources: int  # 0 for data without a source
    targets: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def count_leakage(train: Iterable[Example], test: Iterable[Example]) -> Leakage:
    """The leakage between two sets. Memory grows with the test set only."""
    wanted = [(example.source, example.target or "") for example in test]
    pairs, sources, targets = set(wanted), {source for source, _ in wanted}, {target for _, target in wanted}
    found_pairs, found_sources, found_targets = set[tuple[str, str]](), set[str](), set[str]()
    for example in train:
        source, target = example.source, example.target or ""
        if source in sources:
            found_sources.add(source)
        if target in targets:
            found_targets.add(target)
        if (source, target) in pairs:
            found_pairs.add((source, target))
    return Leakage(
        len(wanted),
        sum(pair in found_pairs for pair in wanted),
        sum(source != "" and source in found_sources for source, _ in wanted),
        sum(target in found_targets for _, target in wanted),
    )


def recipe_leakage(data: DataRecipe) -> Leakage | None:
    """The leakage between the training and the test corpora of a recipe, or its development corpora without a test set.

    None where the recipe names no held-out corpora. Files are compared by their content.
    """
    held_out = data.test or data.dev
    if not held_out:
        return None
    return count_leakage(_examples(data.train, data.invalid), _examples(held_out, data.invalid))


def _examples(corpora: Corpora, invalid: Invalid) -> Iterable[Example]:
    for corpus in corpora:
        for example in read_corpus(corpus, invalid):
            parts = zip(example.source.split("\t"), corpus.modalities or (TEXT,) * corpus.source_parts, strict=False)
            yield Example(
                "\t".join(part if kind in TEXT_KINDS else _content(part) for part, kind in parts), example.target
            )


def _content(name: str) -> str:
    """The digest of a file. A row of an array file (`frames.npz#17`) has its name."""
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name
