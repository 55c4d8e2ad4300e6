"""Documents translated sentence by sentence: plain text, subtitles (SRT, WebVTT), HTML; all else is kept."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.data.readers.corpus import numbered_texts
from transduce.data.readers.files import stored_lines
from transduce.errors import InputError, nearest
from transduce.explain.attention import Link
from transduce.inference.long_sources import AlignedPart, join_links, join_texts, split_long, split_sentences
from transduce.inference.model import Model, Prediction
from transduce.recipe import GenerationRecipe

Generate = Callable[[list[str]], list[Prediction]]


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


def translate_document(
    model: Model, document: Document, *, generate: Generate | None = None, **settings: Any
) -> Document:
    """The document with its segments translated; nothing else changes. Long sentences are split, and never cut.

    `generate` translates sentences, by default `model.generate`; it may put tags before them.
    """
    sources = [_source(segment) if segment.translate else ("", []) for segment in document.segments]
    most = model.max_source_tokens(
        **{name: settings[name] for name in settings if name in GenerationRecipe.model_fields}
    )
    pieces = [_pieces(model, text, most) if text else [] for text, _ in sources]
    tags = [marks for _, marks in sources]
    texts = [piece.strip() for row in pieces for piece in row]
    predictions = model.generate(texts, **settings) if generate is None else generate(texts)
    if any(tags):
        model.explain_predictions([one for one in predictions if one.tokens])
    found, segments = iter(predictions), []
    for segment, marks, row in zip(document.segments, tags, pieces, strict=True):
        if not segment.translate:
            segments.append(segment)
            continue
        outputs = [next(found) for _ in row]
        text = join_texts(row, [one.text for one in outputs])
        aligned = zip(row, outputs, strict=True) if marks else ()
        links = join_links([AlignedPart(piece, one.source, one.text, one.alignment) for piece, one in aligned])
        segments.append(replace(segment, text=_target(segment, text, marks, links, " ".join(row))))
    return replace(document, segments=tuple(segments))


def _source(segment: Segment) -> tuple[str, list[InlineTag]]:
    if segment.markup:
        return separate_tags(segment.text)
    return (" ".join(segment.text.split()) if segment.lines > 1 else segment.text), []


def _pieces(model: Model, text: str, most: int) -> list[str]:
    """Sentences, the long ones in parts of at most `most` tokens."""
    lengths = model.source_encoding.lengths
    return [part for sentence in split_sentences(text) for part in split_long(sentence, most, lengths)]


def _target(segment: Segment, text: str, tags: list[InlineTag], links: Sequence[Link], source: str) -> str:
    if segment.markup:
        return insert_tags(text, tags, links, len(source.split()))
    return wrap_lines(text, segment.lines) if segment.lines > 1 else text


def wrap_lines(text: str, lines: int) -> str:
    """The words of a text in at most so many lines of similar length."""
    words, rows, left = text.split(), [], len(text)
    for row in range(lines, 0, -1):
        line, goal = "", left / row
        while words and (row == 1 or not line or len(line) + len(words[0]) / 2 < goal):
            line = f"{line} {words.pop(0)}".strip()
        left -= len(line) + 1
        rows.append(line)
    return "\n".join(row for row in rows if row)


def insert_tags(text: str, tags: Sequence[InlineTag], links: Sequence[Link], source_words: int) -> str:
    """The text as HTML with every tag once, around the words that are aligned with those that it enclosed.

    Tags are nested as they were: a tag inside another one stays inside, and tags side by side do not overlap.
    """
    words = [html.escape(word, quote=False) for word in text.split()]
    spans = _spans(tags, links, source_words, len(words))
    before: list[str] = [""] * (len(words) + 1)
    after: list[str] = [""] * (len(words) + 1)
    for tag, (begin, end) in zip(tags, spans, strict=True):
        if tag.closing and end > begin:
            before[begin] += tag.opening
            after[end - 1] = tag.closing + after[end - 1]
        else:
            before[begin] += tag.opening + tag.closing
    marked = [first + word + last for first, word, last in zip(before, words, after, strict=False)]
    return " ".join(marked) + before[-1]


def _spans(
    tags: Sequence[InlineTag], links: Sequence[Link], source_words: int, target_words: int
) -> list[tuple[int, int]]:
    """The target words of each tag: those that are aligned with its source words, else a proportional share."""
    spans: list[tuple[int, int]] = []
    for number, tag in enumerate(tags):
        low, high = 0, target_words
        for other, (begin, end) in zip(tags[:number], spans, strict=True):
            if other.closing and other.begin <= tag.begin and tag.end <= other.end and other.end > other.begin:
                low, high = max(low, begin), min(high, end)  # inside
            elif other.end <= tag.begin:
                low = max(low, end)  # behind
        aligned = [target for source, target in links if tag.begin <= source < max(tag.end, tag.begin + 1)]
        scale = target_words / max(source_words, 1)
        begin, end = round(tag.begin * scale), round(tag.end * scale)
        if aligned:
            begin, end = min(aligned), max(aligned) + 1
        begin = min(max(begin, low), max(high, low))
        spans.append((begin, min(max(end, begin), max(high, low)) if tag.end > tag.begin else begin))
    return spans
