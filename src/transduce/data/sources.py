"""Files enter, one `Example` a pair leaves, streaming: TSV, two parallel files, JSONL, Parquet; plain, .gz or .zst.

A line ends at a line feed and nowhere else, so U+2028, form feeds and the like stay inside their line; a carriage
return before the line feed and a byte order mark at the start of a file are taken off. A line that cannot be read is
an error with its place, or dropped and counted (`invalid="drop"`). Damage that hides how much is lost (a truncated
archive, parallel files of different lengths) is always an error. A blank line is a pair of two empty sides.

A source may have several parts (a premise and a hypothesis, a context and a question): they stand in one text, with
a tab between them. Files of text (`data.form: text`) have no source at all: an example is a line, or a block of lines
of a running text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from transduce.data.files import open_bytes, stored_lines
from transduce.data.links import LINKS, LinkError, check_links
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
    examples = _read(corpus, invalid, counts)
    return examples if corpus.form != "running" else blocks(examples)


def _read(corpus: Corpus, invalid: Invalid, counts: Counter[str]) -> Iterator[Example]:
    file = str(corpus.path or corpus.source)
    rows, parse = _rows(corpus)
    if corpus.alignment is not None:
        rows, parse = _with_links(corpus, corpus.alignment, rows, parse)
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


def blocks(lines: Iterable[Example], characters: int = 1000) -> Iterator[Example]:
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


Parse = Callable[[Any, str, int], Example]


def _rows(corpus: Corpus) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """Numbered raw rows, and how one of them becomes an example."""
    kind = form(corpus)
    if corpus.form != "pairs":
        return _text_rows(corpus, kind)
    if kind in ("jsonl", "parquet") and len(corpus.fields) != corpus.inputs + 1:
        raise InputError(
            f"which fields are the {corpus.inputs} inputs?",
            where=str(corpus.path),
            remedy="name them and the target: `fields: [premise, hypothesis, label]`",
        )
    if kind == "parallel":
        return _parallel_rows(corpus), _parallel_pair(str(corpus.target))
    if kind == "parquet":
        return _parquet_rows(str(corpus.path), corpus.fields), _parquet_pair(corpus.fields)
    lines = stored_lines(str(corpus.path))
    return lines, (_jsonl_pair(corpus.fields) if kind == "jsonl" else _tsv_pair(corpus.inputs))


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
            raise _UnreadableError("missing links", repr(name), nearest(name, example.extra))
        return _linked(example, example.extra.get(name, ""))

    def both(row: Any, file: str, number: int) -> Example:
        return _linked(parse(row[0], file, number), _text(row[1]))

    return (rows, inside) if corpus.path is not None else (beside(), both)


def _linked(example: Example, links: str) -> Example:
    try:
        check_links(links, example.source, example.target or "")
    except LinkError as error:
        raise _UnreadableError("bad links", str(error)) from None
    return replace(example, extra={**example.extra, LINKS: links})


def _text_rows(corpus: Corpus, kind: Format) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The same where there is no source: whole lines, or the last of the named fields."""
    fields = corpus.fields[-1:]
    if kind == "parquet":
        return _parquet_rows(str(corpus.path), fields), _parquet_pair(fields)
    lines = stored_lines(str(corpus.path))
    return lines, _jsonl_pair(fields) if kind == "jsonl" else _plain_line


def _plain_line(raw: bytes, file: str, number: int) -> Example:
    return Example("", _text(raw), {}, file, number)


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


def _tsv_pair(inputs: int) -> Parse:
    wanted = ("two", "three", "four")[inputs - 1] if inputs < 4 else str(inputs + 1)

    def parse(raw: bytes, file: str, number: int) -> Example:
        columns = _text(raw).split("\t")
        if columns == [""]:
            return Example("", "", {}, file, number)
        if len(columns) <= inputs:
            found = "one" if len(columns) == 1 else str(len(columns))
            detail = f"expected {wanted} columns separated by a tab, found {found}"
            raise _UnreadableError("missing column", detail)
        extra = {f"column{place}": column for place, column in enumerate(columns[inputs + 1 :], inputs + 2)}
        return Example("\t".join(columns[:inputs]), columns[inputs], extra, file, number)

    return parse


def _jsonl_pair(fields: tuple[str, ...]) -> Parse:
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
        *parts, target = (_field(content, name) for name in fields)
        extra = {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in content.items()
            if name not in fields
        }
        return Example("\t".join(parts), target, extra, file, number)

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


def _parquet_rows(path: str, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
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


def _parquet_pair(fields: tuple[str, ...]) -> Parse:
    def parse(row: dict[str, Any], file: str, number: int) -> Example:
        for name in fields:
            if row[name] is None:
                raise _UnreadableError("missing field", repr(name))
        extra = {name: str(value) for name, value in row.items() if name not in fields and value is not None}
        *parts, target = (_text(row[name]) for name in fields)
        return Example("\t".join(parts), target, extra, file, number)

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
    facts = [form(corpus), corpus.form, corpus.inputs, corpus.fields, corpus.alignment]
    digest = hashlib.sha256(json.dumps(facts).encode())
    third = corpus.alignment if corpus.path is None else None
    for path in (corpus.path, corpus.source, corpus.target, third):
        if path is not None:
            with open_bytes(path) as stream:
                ending = Path(path).suffix if Path(path).suffix in (".gz", ".zst") else ""
                digest.update(f"{ending} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
