"""Files enter, one `Example` a pair leaves, streaming: TSV, two parallel files, JSONL, Parquet; plain, .gz or .zst.

A line ends at a line feed and nowhere else, so U+2028, form feeds and the like stay inside their line; a carriage
return before the line feed and a byte order mark at the start of a file are taken off. A line that cannot be read is
an error with its place, or dropped and counted (`invalid="drop"`). Damage that hides how much is lost (a truncated
archive, parallel files of different lengths) is always an error. A blank line is a pair of two empty sides.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from transduce.data.files import open_bytes, stored_lines
from transduce.data.parallel import mismatch
from transduce.errors import InputError, nearest
from transduce.flow import Example
from transduce.recipe import Corpus

Invalid = Literal["error", "drop"]
Format = Literal["tsv", "jsonl", "parquet", "parallel"]


class Tally(Counter[str]):
    """Dropped lines by reason, and where the first of each stood."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int]] = {}

    def drop(self, reason: str, file: str, line: int) -> None:
        self[reason] += 1
        self.places.setdefault(reason, (file, line))


class _UnreadableError(Exception):
    """Why one line is no pair: the reason it is counted by, and what exactly is wrong."""

    def __init__(self, reason: str, detail: str = "", remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy
        self.problem = f"{reason}: {detail}" if detail else reason
        self.file = ""  # the file it stands in, where that is not the one of the example


def form(corpus: Corpus) -> Format:
    """How the pairs of a corpus are written, by the ending of its name."""
    if corpus.path is None:
        return "parallel"
    ending = Path(corpus.path.removesuffix(".gz").removesuffix(".zst")).suffix.lower()
    if ending == ".parquet":
        return "parquet"
    return "jsonl" if ending in (".jsonl", ".json", ".ndjson") else "tsv"


def read(corpus: Corpus, invalid: Invalid = "error", counts: Counter[str] | None = None) -> Iterator[Example]:
    """Every pair of a corpus in order. Dropped lines are counted by reason in `counts` (with places in a `Tally`)."""
    counts = Tally() if counts is None else counts
    file = str(corpus.path or corpus.source)
    rows, parse = _rows(corpus)
    number = 0
    for number, row in rows:
        try:
            yield parse(row, file, number)
        except _UnreadableError as bad:
            if invalid == "error":
                remedy = bad.remedy or "correct the line, or set `data.invalid=drop` to drop and count such lines"
                raise InputError(bad.problem, where=f"{bad.file or file}:{number}", remedy=remedy) from None
            if isinstance(counts, Tally):
                counts.drop(bad.reason, bad.file or file, number)
            else:
                counts[bad.reason] += 1
    if number == 0:
        raise InputError("no pairs: the file is empty", where=file)


Parse = Callable[[Any, str, int], Example]


def _rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """Numbered raw rows, and how one of them becomes an example."""
    kind = form(corpus)
    if kind == "parallel":
        return _parallel_rows(corpus), _parallel_pair(str(corpus.target))
    if kind == "parquet":
        return _parquet_rows(str(corpus.path), corpus.fields), _parquet_pair(corpus.fields)
    lines = stored_lines(str(corpus.path))
    return lines, (_jsonl_pair(corpus.fields) if kind == "jsonl" else _tsv_pair)


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        remedy = "the file looks like UTF-16: convert it to UTF-8" if wide else ""
        detail = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line"
        raise _UnreadableError("invalid UTF-8", detail, remedy) from None
    if "\0" in text:
        raise _UnreadableError("NUL character", f"at character {text.index(chr(0)) + 1} of the line")
    return text


def _tsv_pair(raw: bytes, file: str, number: int) -> Example:
    columns = _text(raw).split("\t")
    if columns == [""]:
        return Example("", "", {}, file, number)
    if len(columns) < 2:
        raise _UnreadableError("missing column", "expected two columns separated by a tab, found one")
    extra = {f"column{place}": column for place, column in enumerate(columns[2:], 3)}
    return Example(columns[0], columns[1], extra, file, number)


def _jsonl_pair(fields: tuple[str, str]) -> Parse:
    def parse(raw: bytes, file: str, number: int) -> Example:
        line = _text(raw)
        if not line.strip():
            return Example("", "", {}, file, number)
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _UnreadableError("malformed JSON", str(error), "every line holds one JSON object") from None
        if not isinstance(content, dict):
            raise _UnreadableError("malformed JSON", "not an object", "every line holds one JSON object")
        pair = [_field(content, name) for name in fields]
        extra = {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in content.items()
            if name not in fields
        }
        return Example(pair[0], pair[1], extra, file, number)

    return parse


def _field(content: dict[str, Any], name: str) -> str:
    if content.get(name) is None:
        remedy = f"name the two fields of the corpus with `fields`; {nearest(name, content)}" if content else ""
        raise _UnreadableError("missing field", repr(name), remedy)
    if not isinstance(content[name], str):
        raise _UnreadableError("not text", f"field {name!r} holds {json.dumps(content[name])[:40]}")
    try:
        return _text(content[name].encode("utf-8"))  # JSON can spell NUL, and half a surrogate pair
    except UnicodeEncodeError:
        raise _UnreadableError("invalid UTF-8", f"half a surrogate pair in field {name!r}") from None


def _parquet_rows(path: str, fields: tuple[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError("Parquet needs pyarrow", where=path, remedy="pip install 'transduce[parquet]'") from None
    number = 0
    with open_bytes(path) as stream:
        try:
            table = parquet.ParquetFile(stream)
            names = table.schema_arrow.names
            for name in fields:
                if name not in names:
                    raise InputError(f"no column {name!r}", where=path, remedy=nearest(name, names))
                stored = str(table.schema_arrow.field(name).type)
                if "string" not in stored and "binary" not in stored:
                    raise InputError(f"column {name!r} holds {stored}, not text", where=path)
            for batch in table.iter_batches(batch_size=4096):
                columns = {name: batch.column(name) for name in names}
                for name in fields:
                    # Through bytes, since Parquet does not promise that its text is valid UTF-8.
                    columns[name] = columns[name].cast(arrow.large_string()).cast(arrow.large_binary())
                lists = {name: column.to_pylist() for name, column in columns.items()}
                for values in zip(*lists.values(), strict=True):
                    number += 1
                    yield number, dict(zip(lists, values, strict=True))
        except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(f"not readable as Parquet: {error}", where=f"{path}:{number + 1}") from None


def _parquet_pair(fields: tuple[str, str]) -> Parse:
    def parse(row: dict[str, Any], file: str, number: int) -> Example:
        for name in fields:
            if row[name] is None:
                raise _UnreadableError("missing field", repr(name))
        extra = {name: str(value) for name, value in row.items() if name not in fields and value is not None}
        return Example(_text(row[fields[0]]), _text(row[fields[1]]), extra, file, number)

    return parse


def _parallel_rows(corpus: Corpus) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    if corpus.source is None or corpus.target is None:
        raise InputError("parallel text needs both `source` and `target`", where=str(corpus.source or corpus.target))
    for source, target in zip_longest(stored_lines(corpus.source), stored_lines(corpus.target)):
        if source is None or target is None:
            raise mismatch(corpus.source, corpus.target)
        yield source[0], (source[1], target[1])


def _parallel_pair(target_file: str) -> Parse:
    def parse(row: tuple[bytes, bytes], file: str, number: int) -> Example:
        source = _text(row[0])
        try:
            return Example(source, _text(row[1]), {}, file, number)
        except _UnreadableError as bad:
            bad.file = target_file
            raise

    return parse


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a text file, or of standard input for "-": one line in, one line out."""
    file = "standard input" if str(path) == "-" else str(path)
    for number, raw in stored_lines(str(path)):
        try:
            yield _text(raw)
        except _UnreadableError as bad:
            raise InputError(bad.problem, where=f"{file}:{number}", remedy=bad.remedy) from None


def fingerprint(corpus: Corpus) -> str:
    """SHA-256 of all that decides which pairs are read: the bytes of the files, their form and field names."""
    digest = hashlib.sha256(json.dumps([form(corpus), corpus.fields]).encode())
    for path in (corpus.path, corpus.source, corpus.target):
        if path is not None:
            with open_bytes(path) as stream:
                ending = Path(path).suffix if Path(path).suffix in (".gz", ".zst") else ""
                digest.update(f"{ending} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
