"""File formats: the format of a corpus by its name, and the text of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transduce.errors import UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

TEXT, TAGS = "text", "tags"  # kinds of sources: a text; tags such as V;IND;3;SG
TEXT_KINDS = (TEXT, TAGS)  # a source of any other kind names a file
Format = Literal["tsv", "csv", "jsonl", "json", "parquet", "arrow", "tmx", "po", "xml", "hub", "parallel", "folder"]
EXTENSIONS: dict[str, Format] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tmx": "tmx",
    ".po": "po",
    ".pot": "po",
    ".xml": "xml",
}
DATASET_FILES = ("dataset_dict.json", "state.json")  # of a folder that the datasets library wrote
Parse = Callable[[Any, str, int], Example]


def corpus_format(corpus: Corpus) -> Format:
    """The file format of a corpus, by the extension of its name."""
    if corpus.path is None:
        return "parallel"
    if corpus.path.startswith("hf://"):
        return "hub"
    path = Path(corpus.path)
    if path.is_dir() and any((path / name).is_file() for name in DATASET_FILES):
        return "arrow"
    if names_files(corpus) and path.is_dir():
        return "folder"
    return EXTENSIONS.get(_extension(corpus.path), "tsv")


def _extension(path: str) -> str:
    """The extension of a file name, without that of a compression."""
    return Path(path.removesuffix(".gz").removesuffix(".zst")).suffix.lower()


def is_table(name: str) -> bool:
    """Whether the extension of a name is that of a file with columns."""
    return _extension(name) in (*EXTENSIONS, ".tsv", ".tab")


def names_files(corpus: Corpus) -> bool:
    """Whether a source, or a part of it, names a file."""
    return any(kind not in TEXT_KINDS for kind in corpus.modalities)


def decode(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        remedy = "the file looks like UTF-16: convert it to UTF-8" if utf16 else ""
        detail = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line"
        raise UnreadableError("invalid UTF-8", detail, remedy) from None
    if "\0" in text:
        raise UnreadableError("NUL character", f"at character {text.index(chr(0)) + 1} of the line")
    return text


def plain_line(raw: bytes, file: str, number: int) -> Example:
    return Example("", decode(raw), {}, file, number)
