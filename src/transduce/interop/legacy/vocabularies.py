"""The words of a frozen toolkit, by their numbers, in; a tokenizer of ours out, with the order of its rows.

These toolkits read text that was cut into pieces before: what white space parts are the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.data.tokenizers.vocabulary import GIVEN, Vocabulary
from transduce.errors import InputError
from transduce.flow import SPECIALS, UNK
from transduce.interop.huggingface.folder import LONGEST_JSON, inside
from transduce.interop.huggingface.sentencepiece import CODE, NORMAL, SILENT, USER, SentencePiece, library
from transduce.interop.huggingface.tokenizers import NONE, Rows


@dataclass(frozen=True)
class Special:
    """Their numbers of the tokens that have a part of their own; None: they have no such token."""

    pad: int | None
    start: int | None  # of an output
    end: int | None
    unknown: int | None


@dataclass(frozen=True)
class Side:
    """One side of the pairs."""

    tokenizer: Tokenizer
    rows: Rows

    @property
    def size(self) -> int:
        return len(self.rows.numbers)


def read_lines(folder: Path, name: str) -> list[str]:
    path = inside(folder, name)
    if not path.is_file():
        raise InputError(f"there is no {name}", where=str(folder), remedy="put it beside the checkpoint")
    if path.stat().st_size > LONGEST_JSON:
        raise InputError(f"larger than {LONGEST_JSON:,} bytes", where=str(path), remedy="this is no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error}", where=str(path), remedy="fetch it again") from None
    # Only these end a line: a vocabulary may hold other characters that Python calls ends of lines.
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def spaced(words: Sequence[str], special: Special, where: str) -> Side:
    """Words between spaces."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    rows = _rows(len(words), special, where)
    spoken: dict[str, int] = {}
    for number in rows.numbers[len(SPECIALS) :]:
        spoken.setdefault(words[number], number)
    spoken.pop("", None)
    unknown = len(words) if special.unknown is None else special.unknown
    names = {SPECIALS[UNK] + SILENT: unknown}
    backend = Backend(models.WordLevel({**spoken, **names}, unk_token=SPECIALS[UNK] + SILENT))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _side(backend, {number: word for word, number in spoken.items()}, rows, {n: n for n in range(len(words))})


def sentencepiece(model: SentencePiece, listed: Mapping[str, int], special: Special, where: str) -> Side:
    """Pieces of a SentencePiece model, with the numbers of a list."""
    rows = _rows(max(listed.values()) + 1, special, where)
    spelt = {piece for piece, _, kind in model.pieces if kind in (NORMAL, USER)}
    codes = [piece for piece in listed if CODE.fullmatch(piece) and piece not in spelt]  # of languages
    backend, numbers = library(model, dict(listed), codes)
    return _side(backend, {number: piece for piece, number in listed.items()}, rows, numbers)


def _rows(size: int, special: Special, where: str) -> Rows:
    found = [NONE if one is None else one for one in (special.pad, special.start, special.end, special.unknown)]
    if special.end is None or max(found) >= size:
        raise InputError(
            "no token ends a text" if special.end is None else f"token {max(found)} is not among {size} words",
            where=where,
            remedy="the vocabulary belongs to another model: fetch it again",
        )
    return Rows((*found, *(number for number in range(size) if number not in found)), size)


def _side(backend: Any, names: Mapping[int, str], rows: Rows, numbers: Mapping[int, int]) -> Side:
    pieces = [names.get(number, f"<unused {number}>") for number in rows.numbers[len(SPECIALS) :]]
    known = tuple(numbers.get(number, NONE) for number in rows.numbers)
    return Side(Tokenizer(Vocabulary(GIVEN, (*SPECIALS, *pieces), library=backend.to_str(), rows=known)), rows)
