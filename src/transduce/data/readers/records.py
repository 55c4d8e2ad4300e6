"""Records: files whose rows have named fields (JSONL, JSON arrays, Parquet, Arrow, Hugging Face datasets, TMX, PO)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transduce.data.readers.delimited import find_columns, find_text_column
from transduce.data.readers.files import Format, Parse, decode, open_bytes, open_content, stored_lines
from transduce.data.readers.translation_files import po_messages, tmx_units, wmt_segments
from transduce.errors import InputError, UnreadableError, nearest
from transduce.flow import Example
from transduce.recipe import Corpus

Rows = Iterator[tuple[int, Any]]  # numbered mappings; bytes where a line is parsed later, so that it can be dropped
NUMBERING = {"", "id", "idx", "index"}  # names of fields that number the records
CHUNK = 1 << 16  # characters of a JSON array that are read at once


def record_rows(corpus: Corpus, kind: Format) -> tuple[Rows, Parse]:
    """The records of a corpus, and a parser that selects the columns of one."""
    path = str(corpus.path)
    read = READERS[kind]
    fields = corpus.columns or record_columns(corpus, kind)
    return read(path), _pair(fields if corpus.format == "pairs" else fields[-1:])


def record_columns(corpus: Corpus, kind: Format) -> tuple[str, ...]:
    """The columns that hold the sources and the target, or the text, by the names in the first record."""
    number, row = next(READERS[kind](str(corpus.path)), (0, {}))
    try:
        content = _mapping(row)
    except UnreadableError:
        content = {}  # reported with its place when it is read
    names = list(_text_fields(content))
    text = find_text_column(names)
    found = find_columns(names, corpus.source_columns) if corpus.format == "pairs" else (text,) if text else None
    if found is not None:
        return found
    if not names and corpus.source_columns == 1:
        return ("source", "target")
    sources = "the source" if corpus.source_columns == 1 else f"the {corpus.source_columns} sources"
    wanted = "field is the text" if corpus.format != "pairs" else f"fields are {sources} and the target"
    count = corpus.source_columns + 1 if corpus.format == "pairs" else 1
    likely = [name for name in names if name.lower() not in NUMBERING]
    shown = next((few for few in (likely, names) if len(few) >= count), ["premise", "hypothesis", "label"])
    raise InputError(
        f"which {wanted}? There are {', '.join(names) or 'none'}",
        where=f"{corpus.path}:{number}",
        remedy=f"name them: --columns {','.join(shown[:count])}",
    )


def _text_fields(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of the fields that hold text or a label, those of nested mappings with a dot."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _text_fields(value, f"{prefix}{name}.")
        elif isinstance(value, (str, bytes, int)) or (isinstance(value, list) and value and _are_texts(value)):
            yield f"{prefix}{name}"


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _mapping(row: Any) -> dict[str, Any]:
    """A record as a mapping; a line of JSONL is parsed here."""
    if not isinstance(row, bytes):
        return dict(row)
    line = decode(row)
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("malformed JSON", str(error), "every line holds one JSON object") from None
    if not isinstance(content, dict):
        raise UnreadableError("malformed JSON", "not an object", "every line holds one JSON object")
    return content


def _pair(fields: tuple[str, ...]) -> Parse:
    roots = {name.partition(".")[0] for name in fields} | set(fields)

    def parse(row: Any, file: str, number: int) -> Example:
        if isinstance(row, bytes) and not row.strip():
            return Example("", "", {}, file, number)
        content = _mapping(row)
        *parts, target = (_field(content, name) for name in fields)
        extra = {name: _plain(value) for name, value in content.items() if name not in roots and value is not None}
        return Example("\t".join(parts), target, extra, file, number)

    return parse


def _plain(value: Any) -> str:
    if isinstance(value, (str, bytes)):
        return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return json.dumps(value, ensure_ascii=False, default=str)


def _field(content: Mapping[str, Any], name: str) -> str:
    """The text of a field; a name with dots reads nested mappings. A whole number is a label."""
    value: Any = content
    for part in [name] if name in content else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        remedy = f"name the fields with --columns or `data.columns`; {nearest(name, _text_fields(content))}"
        raise UnreadableError("missing field", repr(name), remedy if content else "")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and _are_texts(value):
        if len(value) > 1 and any(" " in word for word in value):
            problem = f"field {name!r} is a list of {len(value)} texts, and a list holds the words of one text"
            remedy = "write a line for each text; with evaluation.references=by_source all are right answers"
            raise UnreadableError("several texts", problem, remedy)
        value = " ".join(value)  # words or tags
    if not isinstance(value, (str, bytes)):
        raise UnreadableError("not text", f"field {name!r} holds {json.dumps(value, default=str)[:40]}")
    try:
        return decode(value if isinstance(value, bytes) else value.encode("utf-8"))  # JSON can encode lone surrogates
    except UnicodeEncodeError:
        raise UnreadableError("invalid UTF-8", f"a lone surrogate in field {name!r}") from None


def json_rows(path: str) -> Rows:
    """The objects of a JSON array, by the number of the line on which they end; or JSONL, where it is no array."""
    with open_content(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape")
        head = text.read(CHUNK).lstrip()
        if head.startswith("["):
            yield from _array_rows(head[1:], text, path)
            return
        if head.startswith("{") and not _is_object(head.partition("\n")[0]):
            raise InputError(
                "one JSON object over several lines is not a list of pairs",
                where=path,
                remedy="write an array of objects, [{...}, {...}], or one object on each line",
            )
    yield from stored_lines(path)


def _is_object(line: str) -> bool:
    """Whether a line holds a whole JSON object; a damaged one, which is reported with its place, counts as whole."""
    return line.rstrip().endswith("}") or len(line) >= CHUNK - 1


def _array_rows(buffer: str, stream: Any, path: str) -> Rows:
    decoder, line, size = json.JSONDecoder(), 1, CHUNK
    while True:
        line += (buffer[: len(buffer) - len(buffer.lstrip(", \t\r\n"))]).count("\n")
        buffer = buffer.lstrip(", \t\r\n")
        if buffer.startswith("]"):
            return
        try:
            content, end = decoder.raw_decode(buffer)
            size = CHUNK
        except (ValueError, RecursionError) as error:
            more = stream.read(size)
            if not more:
                remedy = "a JSON file holds an array of objects, or one object on each line"
                raise InputError(f"malformed JSON: {error}", where=f"{path}:{line}", remedy=remedy) from None
            buffer, size = buffer + more, 2 * size
            continue
        if not isinstance(content, dict):
            raise InputError(f"{str(content)[:40]!r} is not an object", where=f"{path}:{line}")
        line += buffer.count("\n", 0, end)
        buffer = buffer[end:]
        yield line, content


def parquet_rows(path: str) -> Rows:
    """The rows of a Parquet file."""
    arrow, parquet = _pyarrow(path), __import__("pyarrow.parquet", fromlist=["ParquetFile"])
    with open_bytes(path) as stream:
        yield from _arrow_rows(path, arrow, lambda: parquet.ParquetFile(stream).iter_batches(batch_size=4096))


def arrow_rows(path: str) -> Rows:
    """The rows of an Arrow file, or of a folder that `Dataset.save_to_disk` wrote; of several splits, `train`."""
    arrow, before = _pyarrow(path), 0
    for file in arrow_files(Path(path)):
        number = 0
        with open_bytes(str(file)) as stream:
            for number, row in _arrow_rows(str(file), arrow, partial(_arrow_batches, arrow, stream)):
                yield before + number, row
        before += number


def arrow_files(path: Path) -> list[Path]:
    """The files that hold the rows of a saved dataset; a file is itself."""
    if (path / "dataset_dict.json").is_file():
        return arrow_files(path / "train")
    if not path.is_dir():
        return [path]
    try:
        state = json.loads((path / "state.json").read_text("utf-8"))
        return [path / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"not a saved dataset: {error}", where=str(path), remedy="give the folder of one split"
        ) from None


def _arrow_batches(arrow: Any, stream: Any) -> Any:
    """The batches of a stream, as the datasets library writes them, or of a file with a footer."""
    try:
        return arrow.ipc.open_stream(stream)
    except arrow.ArrowInvalid:
        stream.seek(0)
        reader = arrow.ipc.open_file(stream)
        return (reader.get_batch(number) for number in range(reader.num_record_batches))


def _arrow_rows(path: str, arrow: Any, batches: Callable[[], Any]) -> Rows:
    number = 0
    try:
        for batch in batches():
            for row in zip(*(_values(arrow, column) for column in batch.columns), strict=True):
                number += 1
                yield number, dict(zip(batch.schema.names, row, strict=True))
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
        kind = "Parquet" if path.endswith(".parquet") else "Arrow"
        raise InputError(f"not readable as {kind}: {error}", where=f"{path}:{number + 1}") from None


def _values(arrow: Any, column: Any) -> list[Any]:
    """The values of a column. Text comes as bytes, since these formats do not guarantee valid UTF-8."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
        column = column.cast(arrow.large_string()).cast(arrow.large_binary())
    values: list[Any] = column.to_pylist()
    return values


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        remedy = "pip install 'transduce[parquet]'"
        raise InputError("Parquet and Arrow need pyarrow", where=path, remedy=remedy) from None
    return pyarrow


def hub_rows(path: str) -> Rows:
    """The rows of a data set on the Hugging Face Hub: `hf://NAME[:CONFIG][:SPLIT]`, by default the split `train`."""
    try:
        import datasets
    except ImportError:
        raise InputError("hf:// needs datasets", where=path, remedy="pip install 'transduce[datasets]'") from None
    name, *options = path.removeprefix("hf://").split(":")
    config, split = (options[0], options[1]) if len(options) > 1 else (None, options[0] if options else "train")
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # network, names and formats: the library has many kinds of errors
        raise InputError(f"cannot be loaded: {error}", where=path, remedy="hf://NAME:CONFIG:SPLIT") from None
    yield from enumerate(rows, 1)


READERS: dict[str, Callable[[str], Rows]] = {
    "jsonl": stored_lines,
    "json": json_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
    "tmx": tmx_units,
    "po": po_messages,
    "xml": wmt_segments,
    "hub": hub_rows,
}
