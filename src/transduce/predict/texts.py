"""Texts on their way to a model: checked, and in chunks of many lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transduce.errors import InputError


def check_texts(what: str, texts: Sequence[str]) -> None:
    """One text alone would be read letter by letter, and what is no text, or no Unicode, cannot be read at all."""
    if isinstance(texts, str):
        raise InputError(f"{what} takes a list of texts", remedy=f'write model.{what}(["..."])')
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {number} of {len(texts)} is {text!r}", remedy="give strings")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"text {number} of {len(texts)} is not valid Unicode", remedy="write it in UTF-8")


def in_chunks(lines: Iterator[str], size: int = 2000) -> Iterator[list[str]]:
    """Lines in groups large enough to sort by length, small enough to stream."""
    chunk: list[str] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
