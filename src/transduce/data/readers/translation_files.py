"""Files of translators: TMX translation memories, PO catalogues, and the SGML and XML test sets of WMT."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from transduce.data.readers.files import open_content, stored_lines
from transduce.errors import InputError

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
