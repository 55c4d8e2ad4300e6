"""Word vectors as text: the formats of word2vec and GloVe, one word and its numbers a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transduce.errors import InputError
from transduce.storage import replace_file

REMEDY = "write one word and its numbers a line, separated by spaces; word2vec's first line, COUNT WIDTH, may be there"


@dataclass(frozen=True)
class WordVectors:
    """Words with their vectors, in the order of the file."""

    words: Sequence[str]
    vectors: np.ndarray  # V D, float32

    @property
    def width(self) -> int:
        return int(self.vectors.shape[1])


def read_word_vectors(path: str | Path, wanted: Iterable[str] | None = None) -> WordVectors:
    """The vectors of a file; `wanted`: of these words alone, which saves memory."""
    chosen = None if wanted is None else set(wanted)
    words: dict[str, int] = {}
    rows: list[np.ndarray] = []
    width = 0
    for number, word, values in _lines(Path(path)):
        where = f"{path}:{number}"
        width = width or len(values)
        if not values or len(values) != width:
            raise InputError(f"{len(values)} numbers, and {width or 'some'} are expected", where=where, remedy=REMEDY)
        if (chosen is None or word in chosen) and word not in words:
            words[word] = len(rows)
            rows.append(_numbers(values, where))
    if not width:
        raise InputError("the file has no vectors", where=str(path), remedy=REMEDY)
    return WordVectors(list(words), np.stack(rows) if rows else np.zeros((0, width), np.float32))


def _lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line number, word and numbers of each line, without the header of word2vec. A word may contain no spaces."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                word, *values = line.rstrip().split(" ")
                header = number == 1 and len(values) == 1 and word.isdigit() and values[0].isdigit()
                if word and not header:
                    yield number, word, values
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _numbers(values: Sequence[str], where: str) -> np.ndarray:
    try:
        row = np.array([float(value) for value in values], np.float32)
    except ValueError as error:
        raise InputError(str(error), where=where, remedy=REMEDY) from None
    if not np.isfinite(row).all():
        raise InputError("a number is not finite", where=where, remedy=REMEDY)
    return row


def write_word_vectors(path: str | Path, vectors: WordVectors) -> None:
    """The text format of word2vec: a first line COUNT WIDTH, then a word and its numbers a line."""
    rows = zip(vectors.words, vectors.vectors.tolist(), strict=True)
    lines = [f"{word} {' '.join(f'{value:.6g}' for value in row)}\n" for word, row in rows]
    replace_file(Path(path), f"{len(vectors.words)} {vectors.width}\n{''.join(lines)}")
