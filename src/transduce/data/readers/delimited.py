"""Delimited text: TSV and CSV files, their headers, and the columns of source and target."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from transduce.data.readers.files import TEXT_KINDS, Parse, decode, located, stored_lines
from transduce.errors import InputError, UnreadableError, nearest
from transduce.flow import Example
from transduce.recipe import Corpus

# Sources and target, by the names that published data sets use. Earlier rows win.
KNOWN_COLUMNS = (
    ("source", "target"),
    ("src", "tgt"),
    ("src", "trg"),
    ("src", "ref"),
    ("input", "output"),
    ("inputs", "targets"),
    ("input_text", "target_text"),
    ("msgid", "msgstr"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("question", "answer"),
    ("question", "sql"),
    ("dialogue", "summary"),
    ("document", "summary"),
    ("article", "highlights"),
    ("article", "summary"),
    ("text", "summary"),
    ("word", "phones"),
    ("word", "phonemes"),
    ("word", "pronunciation"),
    ("word", "ipa"),
    ("graphemes", "phonemes"),
    ("file_name", "caption"),
    ("file_name", "text"),
    ("file_name", "transcription"),
    ("file_name", "label"),
    ("image", "caption"),
    ("image", "text"),
    ("image", "label"),
    ("audio", "text"),
    ("audio", "sentence"),
    ("path", "sentence"),
    ("tokens", "tags"),
    ("words", "tags"),
    ("text", "target"),
    ("text", "label"),
    ("sentence", "label"),
    ("review", "label"),
    ("review", "sentiment"),
    ("text", "sentiment"),
    ("text", "category"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis", "label"),
    ("sentence1", "sentence2", "label"),
    ("context", "question", "answer"),
    ("lemma", "features", "form"),
    ("lemma", "tags", "form"),
)
TEXT_COLUMNS = ("text", "content", "sentence", "document", "target")
OTHER_COLUMNS = {"", "id", "idx", "index", "no", "number", "score", "split", "domain", "year", "url", "weight"}
_NAMES = {name for row in KNOWN_COLUMNS for name in row} | OTHER_COLUMNS | set(TEXT_COLUMNS)
# ISO 639-1, and the three-letter codes that corpora use.
_LANGUAGES = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
    es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka
    kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng
    nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su
    sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
    ara ces deu eng est fin fra heb hin hun ind ita jpn kor lav lit nld pol por ron rus spa swe tha tur ukr vie zho
    """.split()  # noqa: SIM905 (two hundred quoted names are harder to read)
)
DELIMITERS = ",;\t|"  # of a CSV file
_DELIMITER = {True: "commas", False: "a tab"}  # in messages, by whether cells may be quoted
SAMPLE = 20  # lines from which the delimiter is found
_NUMBER = re.compile("(?:column)?([1-9][0-9]{0,3})")
FEWEST_ROWS, LABEL_ROWS = 10, 10  # below a header; for each value of a column of labels
LONGEST_NAME = 30  # characters
_NAME, _LATIN = re.compile(r"[^\W\d][\w -]*"), re.compile("[A-Za-z]")
LONGEST_CELL = 1 << 20  # characters: a quote that is never closed makes a cell of the rest of the file
Split = Callable[[Any], list[str]]


def is_language(name: str) -> bool:
    """Whether a name is a language code, such as `de`, `deu`, `pt-BR` or `deu_Latn`."""
    found = re.fullmatch(r"([a-z]{2,3})([-_][a-z]{2,4})?", name.lower())
    return found is not None and found[1] in _LANGUAGES


def is_header(cells: Sequence[str]) -> bool:
    """Whether a first line names its columns: every cell is a known name or a language code, and none occurs twice.

    Of three or more columns, a known source and a known target are enough: id, text, label, annotator.
    """
    names = [cell.strip().lower() for cell in cells]
    if len(names) < 2 or len(set(names)) < len(names) or not any(names[1:]):
        return False
    known = len(names) > 2 and any(set(row) <= set(names) for row in KNOWN_COLUMNS)
    return known or all(name in _NAMES or is_language(name) for name in names)


def looks_like_header(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool:
    """Whether a first line that is read as data may name its columns: short names, which differ from what is below.

    A column differs if it has no other Latin letters (Zeichen above Chinese text, price above numbers), if only its
    first cell has an underscore, or if all others are a few values that repeat (sentiment above positive, negative).
    """
    names = [cell.strip() for cell in first]
    if len(names) < 2 or len(set(names)) < len(names) or len(rest) < FEWEST_ROWS:
        return False
    if not all(len(name) <= LONGEST_NAME and _NAME.fullmatch(name) for name in names):
        return False
    columns = [[row[place] for row in rest if place < len(row)] for place in range(len(names))]
    return any(_differs(name, cells) for name, cells in zip(names, columns, strict=True))


def _differs(name: str, cells: Sequence[str]) -> bool:
    """Whether a cell is unlike all cells below it."""
    latin, repeated = any(_LATIN.search(cell) for cell in cells), len(set(cells)) <= len(cells) / LABEL_ROWS
    underscore = "_" in name and not any("_" in cell for cell in cells)
    return bool(cells) and ((_LATIN.search(name) and not latin) or underscore or (repeated and name not in cells))


def sampled_cells(corpus: Corpus, lines: int, *, quoted: bool) -> list[list[str]]:
    """The cells of the first lines of a TSV or CSV file, a header included."""
    rows: Iterator[tuple[int, Any]] = csv_rows(str(corpus.path)) if quoted else stored_lines(str(corpus.path))
    split: Split = _check_cells if quoted else _split_tabs
    found = []
    for _, row in islice(rows, lines):
        with suppress(UnreadableError):
            found.append(split(row))
    return found


def find_columns(names: Sequence[str], sources: int) -> tuple[str, ...] | None:
    """The columns that hold the sources and the target; None where the names do not tell."""
    spelt = {name.strip().rpartition(".")[2].lower(): name for name in reversed(names)}
    for row in KNOWN_COLUMNS:
        if len(row) == sources + 1 and all(name in spelt for name in row):
            return tuple(spelt[name] for name in row)
    languages = tuple(name for name in names if is_language(name.rpartition(".")[2]))
    others = tuple(name for name in names if name.strip().lower() not in OTHER_COLUMNS)
    return next((found for found in (languages, others) if len(found) == sources + 1), None)


def find_text_column(names: Sequence[str]) -> str | None:
    """The column that holds the text of a file without sources; None where the names do not tell."""
    spelt = {name.strip().lower(): name for name in reversed(names)}
    known = next((spelt[name] for name in TEXT_COLUMNS if name in spelt), None)
    others = [name for name in names if name.strip().lower() not in OTHER_COLUMNS]
    return known or (others[0] if len(others) == 1 else None)


def delimited_rows(corpus: Corpus, *, quoted: bool) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """The rows of a TSV file, or of a CSV file, whose cells may be quoted; without the header."""
    names, split, rows = _open(corpus, quoted)
    return rows, _pair(split, _positions(corpus, names), names, _DELIMITER[quoted])


def text_column(corpus: Corpus, *, quoted: bool) -> tuple[Iterator[tuple[int, Any]], Parse]:
    """One column as a text without a source. Of several columns, the one that is meant must be named."""
    path = str(corpus.path)
    names, split, rows = _open(corpus, quoted)
    text = corpus.columns[-1] if corpus.columns else find_text_column(names or [])
    place = None if text is None else _position(text, names, path)

    def parse(raw: Any, file: str, number: int) -> Example:
        cells = split(raw)
        if place is None and len(cells) > 1:
            raise InputError(
                f"{len(cells)} columns, and a text without a source is one of them",
                where=f"{file}:{number}",
                remedy=f"name it: `data.train={{path: {path}, columns: [column2]}}`; or give a file of plain text",
            )
        if place is not None and cells != [""] and len(cells) <= place:
            found = f"{text} of {len(cells)} columns separated by {_DELIMITER[quoted]}"
            raise UnreadableError("missing column", found)
        return Example("", cells[place or 0] if cells != [""] else "", {}, file, number)

    return rows, parse


def named_columns(corpus: Corpus, *, quoted: bool) -> tuple[str, ...]:
    """The names of the source and target columns; none if the first line is data."""
    names, _, _ = _open(corpus, quoted)
    return () if names is None else tuple(names[place] for place in _positions(corpus, names))


def _open(corpus: Corpus, quoted: bool) -> tuple[list[str] | None, Split, Iterator[tuple[int, Any]]]:
    """The header, if there is one, a function that splits a row into cells, and the rows after the header."""
    read, split = (csv_rows, _check_cells) if quoted else (stored_lines, _split_tabs)
    names, rows = _header(corpus, read(str(corpus.path)), split), read(str(corpus.path))
    return names, split, islice(rows, 0 if names is None else 1, None)


def csv_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, by the number of their first line. A quoted cell may contain line feeds.

    Bytes that are not UTF-8 come as surrogates: the row is reported when it is parsed.
    """
    lines = (raw.decode("utf-8", "surrogateescape") + "\n" for _, raw in stored_lines(path))
    sample = list(islice(lines, SAMPLE))
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(chain(sample, lines), delimiter=_delimiter(sample))
    number = 1
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            remedy = "a quoted cell that begins there may never end: write a quote in a cell as two quotes"
            raise InputError(f"not readable as CSV: {error}", where=f"{path}:{number}", remedy=remedy) from None
        yield number, row
        number = reader.line_num + 1


def _delimiter(sample: list[str]) -> str:
    """The delimiter that gives all rows of a sample the same number of cells, at least two; else a comma."""
    for delimiter in DELIMITERS:
        try:
            rows = [row for row in csv.reader(sample, delimiter=delimiter) if row]
        except csv.Error:
            continue
        complete = rows[:-1] if len(sample) == SAMPLE else rows  # the sample may end within a cell
        if len({len(row) for row in complete}) == 1 and len(complete[0]) > 1:
            return delimiter
    return DELIMITERS[0]


def _split_tabs(raw: bytes) -> list[str]:
    return decode(raw).split("\t")


def _check_cells(row: list[str]) -> list[str]:
    return [decode(cell.encode("utf-8", "surrogateescape")) for cell in row] or [""]


def _header(corpus: Corpus, rows: Iterator[tuple[int, Any]], split: Callable[[Any], list[str]]) -> list[str] | None:
    """The cells of the first line, where it is a header: because the corpus says so, or because it looks like one."""
    if corpus.header is False:
        return None
    _, first = next(rows, (0, None))
    if first is None:
        return list(corpus.columns) or None  # an empty file is reported when it is read
    try:
        cells = [cell.strip() for cell in split(first)]
    except UnreadableError:
        return None  # reported with its place when it is read
    named = any(name in cells and not _NUMBER.fullmatch(name) for name in corpus.columns)
    return cells if corpus.header or named or is_header(cells) or _names_no_file(corpus, cells) else None


def _names_no_file(corpus: Corpus, cells: list[str]) -> bool:
    """Whether the cells that should name files have no extension: then they are the names of columns."""
    files = [cell for cell, kind in zip(cells, corpus.modalities, strict=False) if kind not in TEXT_KINDS]
    folder = Path(str(corpus.path)).parent
    return bool(files) and not any(
        Path(cell).suffix or "/" in cell or Path(located(folder, cell)).is_file() for cell in files
    )


def _positions(corpus: Corpus, names: list[str] | None) -> list[int]:
    """The positions of the sources, then that of the target."""
    if corpus.columns:
        places = [_position(name, names, str(corpus.path)) for name in corpus.columns]
        if len(set(places)) == len(places) == corpus.source_columns + 1:
            return places
        raise InputError(
            f"columns {', '.join(corpus.columns)}: {corpus.source_columns} sources and a target are wanted",
            where=str(corpus.path),
            remedy="name different columns, the target last: [column1, column3, column2]",
        )
    wanted = corpus.source_columns + 1
    if names is None:
        return list(range(wanted))
    others = [name for name in names if name.strip().lower() not in OTHER_COLUMNS]
    found = find_columns(names, corpus.source_columns) or (others if len(others) >= wanted else names)[:wanted]
    return [names.index(name) for name in found]


def _position(name: str, names: list[str] | None, path: str) -> int:
    """The position of a column, from 0: by its name in the header, or by its number (`2`, `column2`)."""
    if names is not None and name in names:
        return names.index(name)
    if number := _NUMBER.fullmatch(name):
        return int(number[1]) - 1
    if names is not None:
        raise InputError(f"no column {name!r}", where=f"{path}:1", remedy=nearest(name, names))
    raise InputError(
        f"the first line does not name the column {name!r}",
        where=f"{path}:1",
        remedy="give the positions of the columns, counted from 1: --columns 1,2, or {path: FILE, columns: [1, 2]}",
    )


def _pair(split: Split, positions: list[int], names: list[str] | None, delimiter: str) -> Parse:
    needed = max(positions) + 1
    wanted = {2: "two", 3: "three", 4: "four"}.get(needed, str(needed))
    *sources, target = positions

    def parse(raw: Any, file: str, number: int) -> Example:
        cells = split(raw)
        if cells == [""]:
            return Example("", "", {}, file, number)
        if len(cells) < needed:
            found = "one" if len(cells) == 1 else str(len(cells))
            raise UnreadableError(
                "missing column", f"expected {wanted} columns separated by {delimiter}, found {found}"
            )
        extra = {} if len(cells) == len(positions) else _others(cells, positions, names or [])
        source = cells[sources[0]] if len(sources) == 1 else "\t".join(cells[place] for place in sources)
        return Example(source, cells[target], extra, file, number)

    return parse


def _others(cells: list[str], positions: list[int], names: list[str]) -> dict[str, str]:
    """The cells that are neither source nor target, by the name or the number of their column."""
    return {
        names[place] if place < len(names) else f"column{place + 1}": cell
        for place, cell in enumerate(cells)
        if place not in positions
    }
