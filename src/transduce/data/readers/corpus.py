"""Corpora: streaming readers of text pairs, with their errors, dropped lines and fingerprints.

A corpus is a file in one of the formats of `files.py`, two parallel files, a folder of files, or an IDX file; text
may be compressed (.gz, .zst).

A line ends only at a line feed, so U+2028, form feeds and the like stay inside their line; a carriage return before the
line feed and a byte order mark at the start of a file are removed. An unreadable line is an error with its place, or is
dropped and counted (`invalid="drop"`). Damage that hides how much is lost (a truncated archive, parallel files of
different lengths) is always an error. A blank line is a pair of two empty sides.

A source may have several parts (a premise and a hypothesis, a context and a question), separated by tabs in one text.
Text files (`data.format: text`) have no source: an example is a line, or a chunk of lines of a running text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

from transduce.data.annotations import ALIGNMENT, AlignmentError, check_alignment, examples_in_context
from transduce.data.languages import check_name, split_language, tagged
from transduce.data.readers.delimited import delimited_rows, named_columns, text_column
from transduce.data.readers.files import (
    TEXT,
    TEXT_KINDS,
    LineReader,
    Parse,
    corpus_format,
    decode,
    is_table,
    line_offsets,
    lines_from,
    located,
    names_files,
    open_bytes,
    open_lines,
    plain_line,
    stored_lines,
)
from transduce.data.readers.folders import folder_rows, idx_rows, is_idx, labelled_files, metadata_file
from transduce.data.readers.records import READERS, arrow_files, record_columns, record_rows
from transduce.data.readers.remote import is_remote
from transduce.data.readers.translation_files import mismatch, parallel_pair, parallel_rows
from transduce.errors import InputError, UnreadableError, nearest
from transduce.flow import Example
from transduce.recipe import Corpus

Invalid = Literal["error", "drop"]
# Why a file of a format that leaves units out may hold no pair, and what to do.
EMPTY = {
    "po": ("no message is translated", "messages without a translation, fuzzy and obsolete ones are left out"),
    "tmx": ("there is no translation unit", "a unit is a <tu> with a <tuv> for each language"),
    "xml": ("there is no segment", "a test set has <doc> elements with <src> and <ref>"),
}
WINDOW_LINES, WINDOW_CHARACTERS = 2000, 1 << 20  # of one window
Item = TypeVar("Item")


class DropCounter(Counter[str]):
    """Dropped lines by reason, and the place of the first line of each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int]] = {}

    def drop(self, reason: str, file: str, line: int) -> None:
        self[reason] += 1
        self.places.setdefault(reason, (file, line))


@dataclass(frozen=True)
class CorpusPart:
    """Consecutive lines of a corpus, which are read without those before them."""

    corpus: Corpus
    first: int = 1  # line
    lines: int | None = None  # None: all of them
    offsets: tuple[int, ...] = ()  # bytes before the first line, in each file

    def rows(self, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Its rows, of all rows of the corpus."""
        if self.lines is None:
            return rows
        if self.first == 1:  # the header of a table is not a row
            return takewhile(lambda row: row[0] <= (self.lines or 0), rows)
        sides = [lines_from(*side, self.first) for side in zip(corpus_files(self.corpus), self.offsets, strict=True)]
        numbered = islice(zip(*sides, strict=True), self.lines)
        return ((row[0][0], row[0][1] if len(row) == 1 else tuple(line for _, line in row)) for row in numbered)


@dataclass(frozen=True)
class ByteRange:
    """The lines of a file that begin in a range of its bytes; line numbers are counted from its beginning."""

    corpus: Corpus
    begin: int
    end: int
    lines = 0  # not stated: they are not counted

    def rows(self, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Its rows, of all rows of the corpus."""
        first = 1 if self.begin else next(rows, (1, b""))[0]  # the header of a table is not a row
        with open_bytes(str(self.corpus.path)) as stream:
            if self.begin:  # a line that begins before belongs to the range before
                stream.seek(self.begin - 1)
                stream.readline()
            lines = LineReader(stream, str(self.corpus.path))
            while stream.tell() < self.end and (row := next(lines, None)) is not None:
                if row[0] >= first:
                    yield row


def can_divide(corpus: Corpus) -> bool:
    """Whether a range of the bytes of its only file can be read without the others."""
    return corpus.path is not None and corpus_format(corpus) in ("tsv", "jsonl") and _is_plain(corpus)


def _is_plain(corpus: Corpus) -> bool:
    """Whether the files are local and not compressed, and each line is a pair or a text of its own."""
    plain = corpus_format(corpus) in ("tsv", "jsonl", "parallel")
    separate = corpus.alignment is not None and corpus.path is None
    together = corpus.context or corpus.format == "running" or separate
    return plain and not together and all(map(_can_split, corpus_files(corpus)))


def split_corpus(corpus: Corpus, lines: int) -> list[CorpusPart]:
    """Parts of at most so many lines, of which each is read without the others.

    Only local files with one pair on each line can be split, and only where they are not compressed.
    """
    if not _is_plain(corpus):
        return [CorpusPart(corpus)]
    files = corpus_files(corpus)
    sides = [line_offsets(file, lines) for file in files]
    counts = {count for _, count in sides}
    if len(counts) > 1:
        raise mismatch(*files)
    starts = zip(*(offsets for offsets, _ in sides), strict=True)
    return [CorpusPart(corpus, 1 + lines * number, lines, offsets) for number, offsets in enumerate(starts)]


def corpus_files(corpus: Corpus) -> list[str]:
    """The only file of a corpus, or the two parallel ones."""
    return [str(file) for file in ([corpus.path] if corpus.path is not None else [corpus.source, corpus.target])]


def _can_split(file: str) -> bool:
    packed = file.endswith((".gz", ".zst", ".sgm", ".sgml"))
    return not packed and not is_remote(file) and Path(file).is_file()


def read_corpus(
    corpus: Corpus,
    invalid: Invalid = "error",
    counts: Counter[str] | None = None,
    part: CorpusPart | ByteRange | None = None,  # None: all of the corpus
) -> Iterator[Example]:
    """Every pair of a corpus in order. Dropped lines are counted in `counts`; a `DropCounter` records their places."""
    counts = DropCounter() if counts is None else counts
    examples = _read(corpus, invalid, counts, part)
    if corpus.context:
        column = corpus.document_column if corpus.path is not None else None  # parallel files have no columns
        return examples_in_context(examples, corpus.context, column, corpus.source_columns)
    return examples if corpus.format != "running" else text_chunks(examples)


def _read(
    corpus: Corpus, invalid: Invalid, counts: Counter[str], part: CorpusPart | ByteRange | None = None
) -> Iterator[Example]:
    file = _metadata_of(corpus) or str(corpus.path or corpus.source)
    folder = Path(file) if corpus_format(corpus) == "folder" and Path(file).is_dir() else Path(file).parent
    rows, parse = _rows(corpus)
    if part is not None:
        rows = part.rows(rows)
    if corpus.alignment is not None:
        rows, parse = _with_alignment(corpus, corpus.alignment, rows, parse)
    texts = all(kind in TEXT_KINDS for kind in corpus.modalities)
    number = 0
    for number, row in rows:
        try:
            example = _with_language(parse(row, file, number), corpus)
            if example is not None:
                yield example if texts else _with_paths(example, corpus.modalities, folder)
        except UnreadableError as bad:
            if invalid == "error":
                remedy = bad.remedy or "correct the line, or set `data.invalid=drop` to drop and count such lines"
                raise InputError(bad.problem, where=f"{bad.file or file}:{number}", remedy=remedy) from None
            if isinstance(counts, DropCounter):
                counts.drop(bad.reason, bad.file or file, number)
            else:
                counts[bad.reason] += 1
    if number == 0 and (part is None or part.lines is None):
        reason, remedy = EMPTY.get(corpus_format(corpus), ("the file is empty", ""))
        raise InputError(f"no pairs: {reason}", where=file, remedy=remedy)


def _with_language(example: Example, corpus: Corpus) -> Example | None:
    """The example with the tag of its language before its source; None: the corpus has another language."""
    if corpus.language is None and corpus.language_column is None:
        return example
    found = corpus.language
    if corpus.language_column is not None:
        if corpus.language_column not in example.extra and (example.source or example.target):
            raise UnreadableError(
                "missing language", repr(corpus.language_column), nearest(corpus.language_column, example.extra)
            )
        found = example.extra.get(corpus.language_column, "").strip()
        if not found and not (example.source or example.target):
            return example
        if corpus.language not in (None, found):
            return None
    return replace(example, source=tagged(example.source, check_name(found or "", f"{example.file}:{example.line}")))


def by_language(corpora: Sequence[Corpus], invalid: Invalid = "error") -> list[Corpus]:
    """The corpora, one with a language column as one corpus for each of its languages."""
    found: list[Corpus] = []
    for corpus in corpora:
        if corpus.language_column is None or corpus.language is not None:
            found.append(corpus)
            continue
        languages = {split_language(example.source)[0] for example in read_corpus(corpus, invalid)} - {None}
        found += [corpus.model_copy(update={"language": language}) for language in sorted(map(str, languages))]
    return found


def _metadata_of(corpus: Corpus) -> str | None:
    """The metadata file of a folder corpus."""
    found = metadata_file(str(corpus.path)) if corpus_format(corpus) == "folder" else None
    return None if found is None else str(found)


def _with_paths(example: Example, modalities: tuple[str, ...], folder: Path) -> Example:
    return replace(example, source=resolve_paths(example.source, folder, modalities))


def resolve_paths(source: str, folder: Path, modalities: tuple[str, ...]) -> str:
    """The source with file names relative to the working directory, not to the folder of the file that names them."""
    if all(kind in TEXT_KINDS for kind in modalities):
        return source
    parts = source.split("\t")
    named = [
        part if kind in TEXT_KINDS or not part else located(folder, part)
        for part, kind in zip(parts, modalities, strict=False)
    ]
    return "\t".join(named)


def text_parts(source: str, modalities: tuple[str, ...], wanted: str = TEXT) -> list[str]:
    """The parts of a source that are text, or of another kind."""
    parts = source.split("\t")
    if not modalities:
        return parts if wanted == TEXT else []
    parts = source.split("\t", len(modalities) - 1)
    return [text for part, kind in zip(parts, modalities, strict=False) if kind == wanted for text in part.split("\t")]


def text_chunks(lines: Iterable[Example], characters: int = 1000) -> Iterator[Example]:
    """The lines of a running text joined into chunks of about `characters` characters, cut between lines.

    Every chunk but the first begins with the line feed that separates it from the previous one, so the concatenation of
    all chunks is the text of the file.
    """
    lines_of_chunk: list[str] = []
    size, first = 0, None
    for example in lines:
        if first is not None and size >= characters:
            yield replace(first, target="\n".join(lines_of_chunk))
            lines_of_chunk, size, first = [""], 0, None
        first = first or replace(example, extra={})
        lines_of_chunk.append(example.target or "")
        size += len(lines_of_chunk[-1]) + 1
    if first is not None:
        yield replace(first, target="\n".join(lines_of_chunk))


def _rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """Numbered raw rows, and a parser for one of them."""
    kind = corpus_format(corpus)
    if corpus.format == "pairs" and len(corpus.columns) == 1:
        remedy = "name both columns of a pair, or set `data.format: text`"
        raise InputError("one column is a text without a source", where=str(corpus.path), remedy=remedy)
    if kind in READERS:
        return record_rows(corpus, kind)
    if corpus.format != "pairs":
        if corpus.columns or is_table(str(corpus.path)):
            return text_column(corpus, quoted=kind == "csv")
        return stored_lines(str(corpus.path)), plain_line
    if kind == "folder":
        return folder_rows(corpus)
    if names_files(corpus) and is_idx(corpus.source) and is_idx(corpus.target):
        return idx_rows(corpus)
    if kind == "parallel":
        return parallel_rows(corpus), parallel_pair(str(corpus.target))
    return delimited_rows(corpus, quoted=kind == "csv")


def name_columns(corpus: Corpus) -> Corpus:
    """The corpus with the columns that the names in its file suggest, where it does not state them."""
    kind = corpus_format(corpus)
    if corpus.columns:
        return corpus
    if kind in READERS:
        found = record_columns(corpus, kind)
    elif kind in ("tsv", "csv") and corpus.format == "pairs":
        found = named_columns(corpus, quoted=kind == "csv")
    else:
        found = ()
    return corpus.model_copy(update={"columns": found}) if found else corpus


def _with_alignment(
    corpus: Corpus, name: str, rows: Iterator[tuple[int, Any]], parse: Parse
) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The same with word alignments, from a column of each line or from a third file."""

    def with_third_file() -> Iterator[tuple[int, Any]]:
        for row, line in zip_longest(rows, stored_lines(name)):
            if row is None or line is None:
                raise mismatch(str(corpus.source), name)
            yield row[0], (row[1], line[1])

    def parse_column(row: Any, file: str, number: int) -> Example:
        example = parse(row, file, number)
        if name not in example.extra and (example.source or example.target):
            raise UnreadableError("missing alignment", repr(name), nearest(name, example.extra))
        return _aligned(example, example.extra.get(name, ""))

    def parse_both(row: Any, file: str, number: int) -> Example:
        return _aligned(parse(row[0], file, number), decode(row[1]))

    return (rows, parse_column) if corpus.path is not None else (with_third_file(), parse_both)


def _aligned(example: Example, links: str) -> Example:
    try:
        check_alignment(links, example.source, example.target or "")
    except AlignmentError as error:
        raise UnreadableError("invalid alignment", str(error)) from None
    return replace(example, extra={**example.extra, ALIGNMENT: links})


def gold_similarity(example: Example) -> float | None:
    """The gold similarity of a sentence pair: the third column of a TSV, or the field `score`; None: there is none."""
    value = example.extra.get("column3", example.extra.get("score"))
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"the gold similarity {value!r} is not a number",
            where=f"{example.file}:{example.line}",
            remedy="write: sentence TAB sentence TAB similarity",
        )
    return number


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a text file, or of standard input for "-"."""
    return numbered_texts(stored_lines(str(path)), str(path))


def numbered_texts(lines: Iterable[tuple[int, bytes]], path: str) -> Iterator[str]:
    """The text of each stored line; one that is not text is an error with its place."""
    file = "standard input" if path == "-" else path
    for number, raw in lines:
        try:
            yield decode(raw)
        except UnreadableError as bad:
            raise InputError(bad.problem, where=f"{file}:{number}", remedy=bad.remedy) from None


def fingerprint(corpus: Corpus) -> str:
    """SHA-256 of everything that determines the pairs: the bytes of the files, their format and column names."""
    facts: list[Any] = [corpus_format(corpus), corpus.format, corpus.source_columns, corpus.columns, corpus.header]
    if corpus.language or corpus.language_column:
        facts += [corpus.language, corpus.language_column]
    if corpus.context:
        facts += [corpus.context, corpus.document_column]
    digest = hashlib.sha256(json.dumps([*facts, corpus.alignment]).encode())
    for file in _stored_files(corpus, digest):
        with open_bytes(file) as stream:
            compression = Path(file).suffix if Path(file).suffix in (".gz", ".zst") else ""
            digest.update(f"{compression} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


def _stored_files(corpus: Corpus, digest: Any) -> list[str]:
    """The files whose bytes hold the pairs. Names of labelled folders and rows of the Hub are hashed here."""
    kind, path = corpus_format(corpus), _metadata_of(corpus) or corpus.path
    if kind == "hub":
        for example in _read(corpus, "drop", DropCounter()):
            digest.update(json.dumps([example.source, example.target]).encode())
        return []
    if path is not None and kind == "folder" and Path(path).is_dir():
        digest.update(json.dumps(list(labelled_files(Path(path)))).encode())
        return []
    if path is not None:
        return [str(file) for file in arrow_files(Path(path))] if kind == "arrow" else [path]
    return [file for file in (corpus.source, corpus.target, corpus.alignment) if file is not None]


def file_fingerprint(corpus: Corpus, invalid: Invalid) -> str:
    """SHA-256 of the names, sizes and modification times of the files that the sources of a corpus name."""
    digest, known = hashlib.sha256(), set[str]()
    for example in read_corpus(corpus, invalid):
        for part, kind in zip(example.source.split("\t"), corpus.modalities, strict=False):
            if kind not in TEXT_KINDS and part not in known:
                known.add(part)
                try:
                    stamp = Path(part.partition("#")[0]).stat()  # a number after # selects an array of the file
                    digest.update(f"{part}\0{stamp.st_size}\0{stamp.st_mtime_ns}\n".encode())
                except OSError:
                    digest.update(f"{part}\0missing\n".encode())
    return digest.hexdigest()


def in_windows(
    items: Iterable[Item],
    characters: Callable[[Any], int] = len,
    *,
    size: int = WINDOW_LINES,
    ready: Callable[[], bool] = lambda: True,
) -> Iterator[list[Item]]:
    """Groups of items, in order. A window ends at its limits, or where the next item would have to be waited for."""
    window: list[Item] = []
    total = 0
    for item in items:
        window.append(item)
        total += characters(item)
        if len(window) >= size or total >= WINDOW_CHARACTERS or not ready():
            yield window
            window, total = [], 0
    if window:
        yield window


def example_characters(example: Example) -> int:
    """The characters of a source and its target."""
    return len(example.source) + len(example.target or "")


def read_windows(path: str | Path) -> Iterator[list[str]]:
    """The lines of a text file, or of standard input for "-". Of a pipe or a terminal, those that have come so far."""
    with open_lines(str(path)) as lines:
        yield from in_windows(numbered_texts(lines, str(path)), ready=lines.ready)
