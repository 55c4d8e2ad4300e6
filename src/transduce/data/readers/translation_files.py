"""Parallel text files and files of translators: TMX, PO catalogues, SGML and XML test sets of WMT."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from transduce.data.readers.files import Parse, decode, open_content, stored_lines
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus

XML_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_SEGMENT = re.compile(rb"<seg\b[^>]*>(.*?)</seg>", re.IGNORECASE | re.DOTALL)
_PO_LINE = re.compile(r'(?:(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s+)?(".*")\s*')


def tmx_units(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The units of a translation memory: texts by language, without the region (`en-US` is `en`)."""
    for number, unit in enumerate(_elements(path, "tu"), 1):
        texts: dict[str, str] = {}
        for variant in unit.iter("tuv"):
            language = variant.get(XML_LANGUAGE) or variant.get("lang") or ""
            segment = variant.find("seg")
            if language and segment is not None:
                texts.setdefault(re.split("[-_]", language.lower())[0], _text(segment))
        yield number, texts


def wmt_segments(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The segments of a WMT test set in XML: source and first reference by language."""
    number = 0
    for document in _elements(path, "doc"):
        sides: dict[str, dict[str, str]] = {}
        for side in [*document.iter("src"), *document.iter("ref")]:
            language = side.get("lang") or side.tag
            texts = {segment.get("id", ""): _text(segment) for segment in side.iter("seg")}
            sides.setdefault(language, texts)
        first = next(iter(sides.values()), {})
        for key in first:
            number += 1
            yield number, {language: texts[key] for language, texts in sides.items() if key in texts}


def _elements(path: str, name: str) -> Iterator[ElementTree.Element]:
    """Every element of this name; its parent is emptied after it was used, so that memory does not grow."""
    parents: list[ElementTree.Element] = []
    with open_content(path) as stream:
        try:
            for event, element in ElementTree.iterparse(stream, ("start", "end")):
                if event == "start":
                    parents.append(element)
                    continue
                parents.pop()
                if element.tag == name:
                    yield element
                    for parent in parents[-1:]:
                        parent.clear()
        except ElementTree.ParseError as error:
            line, _ = error.position
            raise InputError(f"malformed XML: {error.msg}", where=f"{path}:{line}") from None


def _text(segment: ElementTree.Element) -> str:
    """The text of a segment without its inline markup, on one line."""
    return " ".join("".join(segment.itertext()).split())


def sgml_segments(path: str) -> Iterator[tuple[int, bytes]]:
    """The segments of one side of a WMT test set in SGML, as lines."""
    with open_content(path) as stream:
        content = stream.read()
    for number, found in enumerate(_SEGMENT.finditer(content), 1):
        text = html.unescape(found[1].decode("utf-8", "surrogateescape"))
        yield number, " ".join(text.split()).encode("utf-8", "surrogateescape")


def po_messages(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The translated messages of a catalogue: `msgid`, `msgstr`, and `msgctxt` where there is one.

    The header, untranslated, obsolete and fuzzy messages are left out; of a plural the first form is used.
    """
    for entry in _po_entries(path):
        message: dict[str, str] = {}
        key = ""
        for number, line in entry:
            if not line or line.startswith("#"):
                continue
            found = _PO_LINE.fullmatch(line)
            if found is None:
                raise InputError(f"not a line of a PO catalogue: {line[:40]!r}", where=f"{path}:{number}")
            key = (found[1] or key).replace("msgstr[0]", "msgstr")
            message[key] = message.get(key, "") + _unquote(found[2], path, number)
        fuzzy = any(line.startswith("#,") and "fuzzy" in line for _, line in entry)
        if message.get("msgid") and message.get("msgstr") and not fuzzy:
            yield entry[0][0], message


def _po_entries(path: str) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines of each entry: comments, message, translation."""
    entry: list[tuple[int, str]] = []
    translated = False
    for number, raw in stored_lines(path):
        line = raw.decode("utf-8", "replace").strip()
        if translated and not line.startswith(('"', "msgstr")):
            yield entry
            entry, translated = [], False
        entry.append((number, line))
        translated = translated or line.startswith("msgstr")
    if translated:
        yield entry


def _unquote(text: str, path: str, number: int) -> str:
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, str):
        raise InputError("a string that is not closed", where=f"{path}:{number}")
    return value


def side_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of one side; of an SGML file its segments."""
    return sgml_segments(path) if Path(path).suffix.lower() in (".sgm", ".sgml") else stored_lines(path)


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
    return np.fromiter((len(raw.strip()) for _, raw in side_lines(path)), np.int64)


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


def parallel_rows(corpus: Corpus) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    if corpus.source is None or corpus.target is None:
        raise InputError("parallel text needs both `source` and `target`", where=str(corpus.source or corpus.target))
    for source, target in zip_longest(side_lines(corpus.source), side_lines(corpus.target)):
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
