"""File formats: TSV, JSONL, Parquet, plain text and parallel files, one example per row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transduce.data.readers.files import open_bytes, stored_lines
from transduce.errors import InputError, UnreadableError, nearest
from transduce.flow import Example
from transduce.recipe import Corpus


def mismatch(source: str, target: str) -> InputError:
    """The error for parallel files of different lengths: both counts and the first suspicious line."""
    sides = [_lengths(source), _lengths(target)]
    line, sign = suspicious_line(*sides)
    longer = source if len(sides[0]) > len(sides[1]) else target
    return InputError(
        f"{source} has {len(sides[0]):,} lines, {target} has {len(sides[1]):,}",
        where=f"{longer}:{line}",
        remedy=f"the first suspicious line is {line:,}: {sign}",
    )


def _lengths(path: str) -> np.ndarray:
    return np.fromiter((len(raw.strip()) for _, raw in stored_lines(path)), np.int64)


def suspicious_line(source: np.ndarray, target: np.ndarray) -> tuple[int, str]:
    """The line where two files of different lengths stop matching, estimated from the lengths of their lines.

    The first line with exactly one empty side; else the line at which removing the surplus from the longer file best
    fits the lengths of all pairs before and after it.
    """
    common = min(len(source), len(target))
    one_empty = (source[:common] == 0) != (target[:common] == 0)
    if one_empty.any():
        return int(one_empty.argmax()) + 1, "one side is empty there"
    if common == 0:
        return 1, "one file is empty"
    shorter, longer = sorted((np.log1p(source), np.log1p(target)), key=len)
    surplus = len(longer) - common
    usual = np.median(longer) - np.median(shorter)
    before = np.abs(longer[:common] - shorter - usual)
    after = np.abs(longer[surplus:] - shorter - usual)
    # cost[k]: the first k lines match as they are, the rest match after skipping `surplus` lines
    cost = np.concatenate([[0.0], np.cumsum(before)]) + np.concatenate([np.cumsum(after[::-1])[::-1], [0.0]])
    best = common - int(cost[::-1].argmin())
    if best == common:
        return common, "the last line of the shorter file"
    return best + 1, "from there on the two sides differ most in length"


TEXT, TAGS = "text", "tags"  # kinds of sources: a text; tags such as V;IND;3;SG
TEXT_KINDS = (TEXT, TAGS)  # a source of any other kind names a file
Format = Literal["tsv", "jsonl", "parquet", "parallel", "folder"]
Parse = Callable[[Any, str, int], Example]
COLUMN = re.compile("column[1-9][0-9]{0,3}")  # a column of a TSV, counted from 1


def corpus_format(corpus: Corpus) -> Format:
    """The file format of a corpus, by the extension of its name."""
    if corpus.path is None:
        return "parallel"
    if names_files(corpus) and Path(corpus.path).is_dir():
        return "folder"
    extension = _extension(corpus.path)
    if extension == ".parquet":
        return "parquet"
    return "jsonl" if extension in (".jsonl", ".json", ".ndjson") else "tsv"


def _extension(path: str) -> str:
    """The extension of a file name, without that of a compression."""
    return Path(path.removesuffix(".gz").removesuffix(".zst")).suffix.lower()


def is_tsv(corpus: Corpus) -> bool:
    """Whether the name says that tabs separate columns; in other text files a tab is white space."""
    return corpus.path is not None and _extension(corpus.path) in (".tsv", ".tab")


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


def tsv_column(name: str, path: str) -> Parse:
    """One column of a TSV as a text without a source: `column2` is the second. Without such a name, it is asked for."""
    wanted = int(name.removeprefix("column")) if COLUMN.fullmatch(name) else None

    def parse(raw: bytes, file: str, number: int) -> Example:
        columns = decode(raw).split("\t")
        if wanted is None:
            if len(columns) > 1:
                raise InputError(
                    f"{len(columns)} columns, and a text without a source is one of them",
                    where=f"{file}:{number}",
                    remedy=f"name it: `data.train={{path: {path}, columns: [column2]}}`; or give a file of plain text",
                )
            return Example("", columns[0], {}, file, number)
        if columns != [""] and len(columns) < wanted:
            raise UnreadableError("missing column", f"{name} of {len(columns)} columns separated by a tab")
        return Example("", columns[wanted - 1] if columns != [""] else "", {}, file, number)

    return parse


def tsv_columns(corpus: Corpus) -> tuple[tuple[int, ...], int]:
    """The numbers of the source columns and of the target, from 0: the leading ones, unless they are named columnN."""
    numbers = [int(name.removeprefix("column")) for name in corpus.columns if COLUMN.fullmatch(name)]
    if not numbers:
        return tuple(range(corpus.source_columns)), corpus.source_columns
    if len(set(numbers)) < len(corpus.columns) or len(numbers) != corpus.source_columns + 1:
        raise InputError(
            f"columns {', '.join(corpus.columns)}: {corpus.source_columns} sources and a target are wanted",
            where=str(corpus.path),
            remedy="name different columns by their numbers, the target last: [column1, column3, column2]",
        )
    return tuple(number - 1 for number in numbers[:-1]), numbers[-1] - 1


def tsv_pair(sources: tuple[int, ...], target: int) -> Parse:
    inputs = max(*sources, target)
    wanted = ("two", "three", "four")[inputs - 1] if inputs < 4 else str(inputs + 1)
    used = {*sources, target}

    def parse(raw: bytes, file: str, number: int) -> Example:
        columns = decode(raw).split("\t")
        if columns == [""]:
            return Example("", "", {}, file, number)
        if len(columns) <= inputs:
            found = "one" if len(columns) == 1 else str(len(columns))
            detail = f"expected {wanted} columns separated by a tab, found {found}"
            raise UnreadableError("missing column", detail)
        extra = {f"column{place + 1}": column for place, column in enumerate(columns) if place not in used}
        return Example("\t".join(columns[place] for place in sources), columns[target], extra, file, number)

    return parse


def jsonl_pair(fields: tuple[str, ...]) -> Parse:
    def parse(raw: bytes, file: str, number: int) -> Example:
        line = decode(raw)
        if not line.strip():
            return Example("", "", {}, file, number)
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableError("malformed JSON", str(error), "every line holds one JSON object") from None
        if not isinstance(content, dict):
            raise UnreadableError("malformed JSON", "not an object", "every line holds one JSON object")
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
        remedy = f"name the two fields of the corpus with `columns`; {nearest(name, content)}" if content else ""
        raise UnreadableError("missing field", repr(name), remedy)
    if not isinstance(content[name], str):
        raise UnreadableError("not text", f"field {name!r} holds {json.dumps(content[name])[:40]}")
    try:
        return decode(content[name].encode("utf-8"))  # JSON can encode NUL and lone surrogates
    except UnicodeEncodeError:
        raise UnreadableError("invalid UTF-8", f"a lone surrogate in field {name!r}") from None


def parquet_rows(path: str, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
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
                    # As bytes, since Parquet does not guarantee valid UTF-8.
                    columns[name] = columns[name].cast(arrow.large_string()).cast(arrow.large_binary())
                lists = {name: column.to_pylist() for name, column in columns.items()}
                for values in zip(*lists.values(), strict=True):
                    number += 1
                    yield number, dict(zip(lists, values, strict=True))
        except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(f"not readable as Parquet: {error}", where=f"{path}:{number + 1}") from None


def parquet_pair(fields: tuple[str, ...]) -> Parse:
    def parse(row: dict[str, Any], file: str, number: int) -> Example:
        for name in fields:
            if row[name] is None:
                raise UnreadableError("missing field", repr(name))
        extra = {name: str(value) for name, value in row.items() if name not in fields and value is not None}
        *parts, target = (decode(row[name]) for name in fields)
        return Example("\t".join(parts), target, extra, file, number)

    return parse


def parallel_rows(corpus: Corpus) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    if corpus.source is None or corpus.target is None:
        raise InputError("parallel text needs both `source` and `target`", where=str(corpus.source or corpus.target))
    for source, target in zip_longest(stored_lines(corpus.source), stored_lines(corpus.target)):
        if source is None or target is None:
            raise mismatch(corpus.source, corpus.target)
        yield source[0], (source[1], target[1])


def parallel_pair(target_file: str) -> Parse:
    def parse(row: tuple[bytes, bytes], file: str, number: int) -> Example:
        source = decode(row[0])
        try:
            return Example(source, decode(row[1]), {}, file, number)
        except UnreadableError as bad:
            bad.file = target_file
            raise

    return parse
