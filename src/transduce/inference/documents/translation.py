"""Translation of documents: segments through a model, inline tags by word alignment, subtitles in their lines."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transduce.explain.attention import Link
from transduce.inference.documents.document import Document, InlineTag, Segment, separate_tags
from transduce.inference.documents.sentences import split_long, split_sentences
from transduce.inference.model import Model, Prediction
from transduce.recipe import GenerationRecipe

Generate = Callable[[list[str]], list[Prediction]]


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
        text, links = _joined(row, outputs, aligned=bool(marks))
        segments.append(replace(segment, text=_target(segment, text, marks, links, " ".join(row))))
    return replace(document, segments=tuple(segments))


def _source(segment: Segment) -> tuple[str, list[InlineTag]]:
    if segment.markup:
        return separate_tags(segment.text)
    return (" ".join(segment.text.split()) if segment.lines > 1 else segment.text), []


def _pieces(model: Model, text: str, most: int) -> list[str]:
    """Sentences, the long ones in parts of at most `most` tokens."""
    return [part for sentence in split_sentences(text) for part in _fitting(model, sentence, most)]


def _fitting(model: Model, text: str, most: int) -> list[str]:
    """Parts of at most `most` tokens; a longer word stays whole."""
    length = model.source_encoding.lengths([text.strip()])[0]
    parts = split_long(text, most, length)
    return parts if len(parts) == 1 else [one for part in parts for one in _fitting(model, part, most)]


def _joined(pieces: Sequence[str], outputs: Sequence[Prediction], *, aligned: bool) -> tuple[str, list[Link]]:
    """The outputs with the white space between their sources, and the links of all of them."""
    text, links, source_words = "", list[Link](), 0
    for piece, output in zip(pieces, outputs, strict=True):
        target_words = len(text.split())
        if aligned:
            tags = len(output.source.split()) - len(piece.split())  # before the sentence
            moved = ((source - tags, target) for source, target in output.alignment if source >= tags)
            links += [(source + source_words, target + target_words) for source, target in moved]
        text += output.text + piece[len(piece.rstrip()) :]
        source_words += len(piece.split())
    return text.rstrip(), links


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
