"""Files enter, one `Example` a pair leaves, streaming: TSV, two parallel files, JSONL, Parquet; plain, .gz or .zst;
folders of files, and files of many arrays, where sources name files.

A line ends at a line feed and nowhere else, so U+2028, form feeds and the like stay inside their line; a carriage
return before the line feed and a byte order mark at the start of a file are taken off. A line that cannot be read is
an error with its place, or dropped and counted (`invalid="drop"`). Damage that hides how much is lost (a truncated
archive, parallel files of different lengths) is always an error. A blank line is a pair of two empty sides.

A source may have several parts (a premise and a hypothesis, a context and a question): they stand in one text, with
a tab between them. Files of text (`data.format: text`) have no source at all: an example is a line, or a block of lines
of a running text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from transduce.data.readers import formats
from transduce.data.readers.files import open_bytes, stored_lines
from transduce.data.readers.folders import folder_rows, idx_rows, is_idx, labelled_files, metadata_file
from transduce.data.readers.formats import Parse, corpus_format, decode, mismatch
from transduce.data.word_alignment import ALIGNMENT, AlignmentError, check_alignment
from transduce.errors import InputError, UnreadableError, nearest
from transduce.flow import Example
from transduce.recipe import Corpus

Invalid = Literal["error", "drop"]
TEXT = "text"  # the kind of a source that names no file


class DropCounter(Counter[str]):
    """Dropped lines by reason, and where the first of each stood."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int]] = {}

    def drop(self, reason: str, file: str, line: int) -> None:
        self[reason] += 1
        self.places.setdefault(reason, (file, line))


def read_corpus(corpus: Corpus, invalid: Invalid = "error", counts: Counter[str] | None = None) -> Iterator[Example]:
    """Every pair of a corpus in order. Dropped lines are counted by reason in `counts` (with places in a `Tally`)."""
    counts = DropCounter() if counts is None else counts
    examples = _read(corpus, invalid, counts)
    return examples if corpus.format != "running" else text_chunks(examples)


def _read(corpus: Corpus, invalid: Invalid, counts: Counter[str]) -> Iterator[Example]:
    file = _list_of(corpus) or str(corpus.path or corpus.source)
    folder = Path(file) if corpus_format(corpus) == "folder" and Path(file).is_dir() else Path(file).parent
    rows, parse = _rows(corpus)
    if corpus.alignment is not None:
        rows, parse = _with_links(corpus, corpus.alignment, rows, parse)
    number = 0
    for number, row in rows:
        try:
            yield _located(parse(row, file, number), corpus.modalities, folder)
        except UnreadableError as bad:
            if invalid == "error":
                remedy = bad.remedy or "correct the line, or set `data.invalid=drop` to drop and count such lines"
                raise InputError(bad.problem, where=f"{bad.file or file}:{number}", remedy=remedy) from None
            if isinstance(counts, DropCounter):
                counts.drop(bad.reason, bad.file or file, number)
            else:
                counts[bad.reason] += 1
    if number == 0:
        raise InputError("no pairs: the file is empty", where=file)


def _list_of(corpus: Corpus) -> str | None:
    """The file that lists the files of a folder."""
    found = metadata_file(str(corpus.path)) if corpus_format(corpus) == "folder" else None
    return None if found is None else str(found)


def _located(example: Example, reads: tuple[str, ...], folder: Path) -> Example:
    return replace(example, source=resolve_paths(example.source, folder, reads))


def resolve_paths(source: str, folder: Path, reads: tuple[str, ...]) -> str:
    """Where parts of a source name files, they are named from here, not from the folder of the file that names them."""
    if all(kind == TEXT for kind in reads):
        return source
    parts = source.split("\t")
    named = [part if kind == TEXT or not part else str(folder / part) for part, kind in zip(parts, reads, strict=False)]
    return "\t".join(named)


def text_parts(source: str, reads: tuple[str, ...]) -> list[str]:
    """The parts of a source that are text."""
    parts = source.split("\t")
    if not reads:
        return parts
    parts = source.split("\t", len(reads) - 1)
    return [text for part, kind in zip(parts, reads, strict=False) if kind == TEXT for text in part.split("\t")]


def text_chunks(lines: Iterable[Example], characters: int = 1000) -> Iterator[Example]:
    """The lines of a running text, put together again: blocks of about so many characters, cut between lines.

    Every block but the first begins with the line feed that parts it from the one before, so the texts of all blocks,
    one after the other, are the text of the file.
    """
    held: list[str] = []
    size, first = 0, None
    for example in lines:
        if first is not None and size >= characters:
            yield replace(first, target="\n".join(held))
            held, size, first = [""], 0, None
        first = first or replace(example, extra={})
        held.append(example.target or "")
        size += len(held[-1]) + 1
    if first is not None:
        yield replace(first, target="\n".join(held))


def _rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """Numbered raw rows, and how one of them becomes an example."""
    kind = corpus_format(corpus)
    if corpus.format != "pairs":
        return _text_rows(corpus, kind)
    if kind == "folder":
        return folder_rows(corpus)
    if formats.names_files(corpus) and is_idx(corpus.source) and is_idx(corpus.target):
        return idx_rows(corpus)
    if kind in ("jsonl", "parquet") and len(corpus.columns) != corpus.source_columns + 1:
        raise InputError(
            f"which columns are the {corpus.source_columns} sources?",
            where=str(corpus.path),
            remedy="name them and the target: `columns: [premise, hypothesis, label]`",
        )
    if kind == "parallel":
        return formats.parallel_rows(corpus), formats.parallel_pair(str(corpus.target))
    if kind == "parquet":
        return formats.parquet_rows(str(corpus.path), corpus.columns), formats.parquet_pair(corpus.columns)
    lines = stored_lines(str(corpus.path))
    return lines, (formats.jsonl_pair(corpus.columns) if kind == "jsonl" else formats.tsv_pair(corpus.source_columns))


def _text_rows(corpus: Corpus, kind: formats.Format) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The same where there is no source: whole lines, or the last of the named fields."""
    fields = corpus.columns[-1:]
    if kind == "parquet":
        return formats.parquet_rows(str(corpus.path), fields), formats.parquet_pair(fields)
    lines = stored_lines(str(corpus.path))
    return lines, formats.jsonl_pair(fields) if kind == "jsonl" else formats.plain_line


def _with_links(
    corpus: Corpus, name: str, rows: Iterator[tuple[int, Any]], parse: Parse
) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The same with links between the words of each pair, from a column or field of its line or from a third file."""

    def beside() -> Iterator[tuple[int, Any]]:
        for row, line in zip_longest(rows, stored_lines(name)):
            if row is None or line is None:
                raise mismatch(str(corpus.source), name)
            yield row[0], (row[1], line[1])

    def inside(row: Any, file: str, number: int) -> Example:
        example = parse(row, file, number)
        if name not in example.extra and (example.source or example.target):
            raise UnreadableError("missing links", repr(name), nearest(name, example.extra))
        return _linked(example, example.extra.get(name, ""))

    def both(row: Any, file: str, number: int) -> Example:
        return _linked(parse(row[0], file, number), decode(row[1]))

    return (rows, inside) if corpus.path is not None else (beside(), both)


def _linked(example: Example, links: str) -> Example:
    try:
        check_alignment(links, example.source, example.target or "")
    except AlignmentError as error:
        raise UnreadableError("bad links", str(error)) from None
    return replace(example, extra={**example.extra, ALIGNMENT: links})


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a text file, or of standard input for "-": one line in, one line out."""
    file = "standard input" if str(path) == "-" else str(path)
    for number, raw in stored_lines(str(path)):
        try:
            yield decode(raw)
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{file}:{number}", remedy=bad.remedy) from None


def fingerprint(corpus: Corpus) -> str:
    """SHA-256 of all that decides which pairs are read: the bytes of the files, their form and field names."""
    facts = [corpus_format(corpus), corpus.format, corpus.source_columns, corpus.columns, corpus.alignment]
    digest = hashlib.sha256(json.dumps(facts).encode())
    third = corpus.alignment if corpus.path is None else None
    whole = _list_of(corpus) or corpus.path
    if whole is not None and corpus_format(corpus) == "folder" and Path(whole).is_dir():
        digest.update(json.dumps(list(labelled_files(Path(whole)))).encode())
        whole = None
    for path in (whole, corpus.source, corpus.target, third):
        if path is not None:
            with open_bytes(path) as stream:
                ending = Path(path).suffix if Path(path).suffix in (".gz", ".zst") else ""
                digest.update(f"{ending} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


def file_fingerprint(corpus: Corpus, invalid: Invalid) -> str:
    """SHA-256 of which files the sources of a corpus name, how large they are and when they were written."""
    digest, known = hashlib.sha256(), set[str]()
    for example in read_corpus(corpus, invalid):
        for part, kind in zip(example.source.split("\t"), corpus.modalities, strict=False):
            if kind != TEXT and part not in known:
                known.add(part)
                try:
                    stamp = Path(part.partition("#")[0]).stat()  # what stands behind # is one of many in a file
                    digest.update(f"{part}\0{stamp.st_size}\0{stamp.st_mtime_ns}\n".encode())
                except OSError:
                    digest.update(f"{part}\0missing\n".encode())
    return digest.hexdigest()
