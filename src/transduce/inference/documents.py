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
from transduce.inference.long_sources import AlignedPart, join_links, join_texts, split_long, split_sentences
from transduce.inference.model import Model
from transduce.inference.prediction import Prediction
from transduce.inference.protected_spans import (
    INLINE_TAG,
    KINDS,
    TAG,
    InlineTag,
    has_words,
    insert_tags,
    separate_tags,
    split_markup,
)
from transduce.recipe import GenerationRecipe

Generate = Callable[[list[str]], list[Prediction]]


@dataclass(frozen=True)
class Segment:
    """A part of a document. `text` is its source, and is written as it is where the segment is not translated."""

    text: str
    translate: bool = True
    lines: int = 1  # of a subtitle: the text is written in so many lines
    markup: bool = False  # True: `text` is HTML, or XML
    xml: bool = False  # True: every tag is inline, whatever its name

    @property
    def tag(self) -> re.Pattern[str]:
        """The inline tags of its markup."""
        return TAG if self.xml else INLINE_TAG


@dataclass(frozen=True)
class Document:
    """The parts of a document, in order: joined they are the document."""

    segments: tuple[Segment, ...]
    format: str = "text"

    def __str__(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def sentences(self) -> list[list[str]]:
        """The sentences of each segment that is translated, without tags; joined they are the text of the segment."""
        return [split_sentences(_source(segment)[0]) for segment in self.segments if segment.translate]

    @property
    def has_tags(self) -> bool:
        """Whether there are inline tags, which need a word alignment."""
        return any(one.markup and one.tag.search(one.text) for one in self.segments if one.translate)

    def translated(self, rows: Sequence[Sequence[AlignedPart]]) -> Document:
        """The document with the translations of its sentences, a row for each segment that is translated."""
        found = iter(rows)
        segments = (_target(one, next(found)) if one.translate else one for one in self.segments)
        return replace(self, segments=tuple(segments))


def parse_text(content: str) -> list[Segment]:
    """Sentences, and the white space around them."""
    return [part for sentence in split_sentences(content) for part in trimmed(sentence)]


def trimmed(text: str, **options: int | bool) -> list[Segment]:
    """White space, the text without it, white space. What has no letters is kept as it is, and so are addresses."""
    core = text.strip()
    before, _, after = text.partition(core) if core else (text, "", "")
    parts = [Segment(before, translate=False), Segment(core, has_words(core), **options)]  # type: ignore[arg-type]
    return [part for part in [*parts, Segment(after, translate=False)] if part.text]


_TIMES = re.compile(r"^[\d:.,]+ --> [\d:.,]+.*$")


def parse_subtitles(content: str) -> list[Segment]:
    """The texts of the cues; numbers, times, notes and styles are kept. A cue is one segment of several lines."""
    segments: list[Segment] = []
    for block in re.split(r"((?:\r?\n[ \t]*){2,})", content):
        lines = re.split(r"(\r?\n)", block)
        times = next((number for number, line in enumerate(lines) if _TIMES.match(line)), None)
        if times is None or times + 2 >= len(lines):
            segments.append(Segment(block, translate=False))
            continue
        segments.append(Segment("".join(lines[: times + 2]), translate=False))
        cue = "".join(lines[times + 2 :])
        segments += trimmed(cue, lines=cue.strip().count("\n") + 1)
    return [segment for segment in segments if segment.text]


_MARKUP = re.compile(
    r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<(script|style|pre|textarea|svg|math)\b.*?</\1\s*>|<[!?/a-zA-Z][^<>]*>",
    re.DOTALL | re.IGNORECASE,
)


def parse_html(content: str) -> list[Segment]:
    """The texts between block tags, with the inline tags in them; everything else is kept."""
    segments, run = [], ""
    for token in split_markup(content, _MARKUP):
        if _MARKUP.fullmatch(token) and not INLINE_TAG.fullmatch(token):
            segments += [*_html_run(run), Segment(token, translate=False)]
            run = ""
        else:
            run += token
    return [segment for segment in [*segments, *_html_run(run)] if segment.text]


def _html_run(run: str) -> list[Segment]:
    """A text with inline tags: sentences where it has none, else one segment."""
    if not run.strip() or not has_words(plain_text(run)):
        return [Segment(run, translate=False)]
    if INLINE_TAG.search(run):
        return trimmed(run, markup=True)
    return [part for sentence in split_sentences(run) for part in trimmed(sentence, markup=True)]


def plain_text(markup: str) -> str:
    """The text of an HTML segment without tags and character references."""
    return html.unescape(INLINE_TAG.sub("", markup))


_XML_MARKUP = re.compile(rf"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<[!?][^<>]*>|{TAG.pattern}", re.DOTALL)


def parse_xml(content: str, *, splitting: Sequence[str] = (), ignored: Sequence[str] = ()) -> list[Segment]:
    """The texts between `splitting` tags, with all other tags in them; elements of `ignored` tags are kept."""
    segments, run, inside = list[Segment](), "", list[str]()  # inside: ignored elements that are open

    def flush() -> None:
        nonlocal run
        words = has_words(html.unescape(TAG.sub("", run)))
        segments.extend(trimmed(run, markup=True, xml=True) if words else [Segment(run, translate=False)])
        run = ""

    for token in split_markup(content, _XML_MARKUP):
        name = token.strip("</>").split()[0] if TAG.fullmatch(token) else ""
        if inside or name in ignored:
            if token.startswith("</") and inside[-1:] == [name]:
                inside.pop()
            elif name in ignored and not token.startswith("</") and not token.endswith("/>"):
                inside.append(name)
        elif not (_XML_MARKUP.fullmatch(token) and (not name or name in splitting)):
            run += token
            continue
        flush()
        segments.append(Segment(token, translate=False))
    flush()
    return [segment for segment in segments if segment.text]


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

    Addresses, numbers, placeholders and emoji are kept, unless `protect` says otherwise.

    `generate` translates sentences, by default `model.generate`; it may put tags before them.
    """
    settings = {"protect": KINDS, **settings}
    most = model.max_source_tokens(
        **{name: settings[name] for name in settings if name in GenerationRecipe.model_fields}
    )
    lengths = model.source_encoding.lengths
    rows = [[part for one in row for part in split_long(one, most, lengths)] for row in document.sentences]
    texts = [piece.strip() for row in rows for piece in row]
    predictions = model.generate(texts, **settings) if generate is None else generate(texts)
    tagged = document.has_tags
    if tagged:
        model.explain_predictions([one for one in predictions if one.tokens])
    found = iter(predictions)
    outputs = [[(piece, next(found)) for piece in row] for row in rows]
    return document.translated(
        [
            [AlignedPart(piece, one.source, one.text, one.alignment if tagged else ()) for piece, one in row]
            for row in outputs
        ]
    )


def _source(segment: Segment) -> tuple[str, list[InlineTag]]:
    if segment.markup:
        return separate_tags(segment.text, segment.tag)
    return (" ".join(segment.text.split()) if segment.lines > 1 else segment.text), []


def _target(segment: Segment, row: Sequence[AlignedPart]) -> Segment:
    sources = [part.source for part in row]
    text = join_texts(sources, [part.output for part in row])
    if segment.markup:
        words = len(" ".join(sources).split())
        text = insert_tags(text, _source(segment)[1], join_links(row), words)
    return replace(segment, text=wrap_lines(text, segment.lines) if segment.lines > 1 else text)


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
