"""Documents as segments to translate and text to keep: plain text, subtitles (SRT, WebVTT), HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transduce.data.readers.corpus import numbered_texts
from transduce.data.readers.files import stored_lines
from transduce.errors import InputError, nearest
from transduce.inference.documents.sentences import split_sentences


@dataclass(frozen=True)
class InlineTag:
    """A tag inside a sentence, around the words from `begin` to `end`, or before the word `begin`."""

    opening: str
    closing: str  # empty: the tag encloses nothing
    begin: int
    end: int


@dataclass(frozen=True)
class Segment:
    """A part of a document. `text` is its source, and is written as it is where the segment is not translated."""

    text: str
    translate: bool = True
    lines: int = 1  # of a subtitle: the text is written in so many lines
    markup: bool = False  # True: `text` is HTML


@dataclass(frozen=True)
class Document:
    """The parts of a document, in order: joined they are the document."""

    segments: tuple[Segment, ...]
    format: str = "text"

    def __str__(self) -> str:
        return "".join(segment.text for segment in self.segments)


def parse_text(content: str) -> list[Segment]:
    """Sentences, and the white space around them."""
    return [part for sentence in split_sentences(content) for part in trimmed(sentence)]


def trimmed(text: str, **options: int | bool) -> list[Segment]:
    """White space, the text without it, white space. What has no letters is kept as it is, and so are addresses."""
    core = text.strip()
    before, _, after = text.partition(core) if core else (text, "", "")
    parts = [Segment(before, translate=False), Segment(core, has_words(core), **options)]  # type: ignore[arg-type]
    return [part for part in [*parts, Segment(after, translate=False)] if part.text]


_ADDRESS = re.compile(r"(?:[a-z][a-z+.-]*://|www\.)\S+|\S+@\S+\.\S+|\{\{?[\w.]*\}?\}|%[\w(]\S*", re.IGNORECASE)


def has_words(text: str) -> bool:
    """Whether there is something to translate: a letter outside of addresses and placeholders."""
    return any(character.isalpha() for character in _ADDRESS.sub("", text))


_TIMES = re.compile(r"^[\d:.,]+ --> [\d:.,]+.*$")


def parse_subtitles(content: str) -> list[Segment]:
    """The texts of the cues; numbers, times, notes and styles are kept. A cue is one segment of several lines."""
    segments: list[Segment] = []
    for block in re.split(r"((?:\r?\n[ \t]*){2,})", content):
        lines = re.split(r"(\r?\n)", block)
        times = next((place for place, line in enumerate(lines) if _TIMES.match(line)), None)
        if times is None or times + 2 >= len(lines):
            segments.append(Segment(block, translate=False))
            continue
        segments.append(Segment("".join(lines[: times + 2]), translate=False))
        cue = "".join(lines[times + 2 :])
        segments += trimmed(cue, lines=cue.strip().count("\n") + 1)
    return [segment for segment in segments if segment.text]


_INLINE = "a|abbr|b|bdi|bdo|cite|code|del|dfn|em|font|i|ins|kbd|mark|q|s|small|span|strong|sub|sup|u|wbr|img"
_MARKUP = re.compile(
    r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<(script|style|pre|textarea|svg|math)\b.*?</\1\s*>|<[!?/a-zA-Z][^<>]*>",
    re.DOTALL | re.IGNORECASE,
)
_INLINE_TAG = re.compile(rf"</?(?:{_INLINE})(?:\s[^<>]*)?/?>", re.IGNORECASE)


def parse_html(content: str) -> list[Segment]:
    """The texts between block tags, with the inline tags in them; everything else is kept."""
    segments, run = [], ""
    for token in _tokens(content):
        if _MARKUP.fullmatch(token) and not _INLINE_TAG.fullmatch(token):
            segments += [*_html_run(run), Segment(token, translate=False)]
            run = ""
        else:
            run += token
    return [segment for segment in [*segments, *_html_run(run)] if segment.text]


def _tokens(content: str) -> list[str]:
    """Markup and the text between, joined the content."""
    tokens, place = [], 0
    for match in _MARKUP.finditer(content):
        tokens += [content[place : match.start()], match.group()]
        place = match.end()
    return [token for token in [*tokens, content[place:]] if token]


def _html_run(run: str) -> list[Segment]:
    """A text with inline tags: sentences where it has none, else one segment."""
    if not run.strip() or not has_words(plain_text(run)):
        return [Segment(run, translate=False)]
    if _INLINE_TAG.search(run):
        return trimmed(run, markup=True)
    return [part for sentence in split_sentences(run) for part in trimmed(sentence, markup=True)]


def plain_text(markup: str) -> str:
    """The text of an HTML segment without tags and character references."""
    return html.unescape(_INLINE_TAG.sub("", markup))


def separate_tags(markup: str) -> tuple[str, list[InlineTag]]:
    """The plain text of a segment, and its inline tags with the words that they enclose, outer tags first."""
    text, tags, open_tags = "", list[InlineTag](), list[tuple[str, int, int]]()
    for token in _tokens(markup):
        if not _INLINE_TAG.fullmatch(token):
            text += html.unescape(token)
            continue
        word = len(text.split())
        inside = bool(text) and not text[-1].isspace()  # the tag stands inside a word, or behind it
        if not token.startswith("</"):
            open_tags.append((token, len(tags), word))
            tags.append(InlineTag(token, "", word, word))
        elif (number := _matching(open_tags, token)) is not None:
            opening, place, begin = open_tags.pop(number)
            tags[place] = InlineTag(opening, token, begin, max(word, begin))
        else:
            tags.append(InlineTag(token, "", word - inside, word - inside))
    return text, tags


def _matching(open_tags: list[tuple[str, int, int]], closing: str) -> int | None:
    name = re.sub(r"[</>\s]", "", closing).lower()
    places = [number for number, (tag, _, _) in enumerate(open_tags) if re.match(rf"<{name}\b", tag, re.IGNORECASE)]
    return places[-1] if places else None


FORMATS: dict[str, Callable[[str], list[Segment]]] = {
    ".txt": parse_text,
    ".srt": parse_subtitles,
    ".vtt": parse_subtitles,
    ".html": parse_html,
    ".htm": parse_html,
}


def parse_document(content: str, extension: str) -> Document:
    if extension not in FORMATS:
        raise InputError(f"no documents end with {extension!r}", remedy=nearest(extension, FORMATS))
    return Document(tuple(FORMATS[extension](content)), extension.removeprefix("."))


def read_document(path: str | Path) -> Document:
    """The document of a file, in the format of its extension; line feeds are those of Unix."""
    lines = numbered_texts(stored_lines(str(path)), str(path))
    return parse_document("".join(f"{line}\n" for line in lines), Path(path).suffix.lower())
