"""Annotations of pairs: preceding sentences of the document, and word alignments.

Links are written `0-0 1-2`: source word, target word, counted from 0. Every token of a linked target word is linked
with every token of its source word, so attention that follows the links sums to 1 over the source word.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from transduce.data.languages import split_language
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError, nearest
from transduce.flow import EOS, Example

CONTEXT = "context"  # the key in `Example.extra` of the number of sentences
ALIGNMENT = "alignment"  # the key of the alignment in `Example.extra` and `Batch.extra`
Link = tuple[int, int]


class DocumentContext:
    """The last `size` sentences of a document, in order; a blank line ends the document."""

    def __init__(self, size: int) -> None:
        self._sentences: deque[str] = deque(maxlen=size)

    def clear(self) -> None:
        self._sentences.clear()

    def add_to(self, source: str) -> str:
        """`source TAB context`, and the sentence becomes context of the next one. A blank line stays as it is."""
        if not source.strip():
            self.clear()
            return source
        found = f"{source}\t{' '.join(self._sentences)}"
        self._sentences.append(split_language(source)[1].replace("\t", " "))
        return found


def without_context(source: str) -> str:
    """The source before its context, which is the last part."""
    return source.rpartition("\t")[0] or source


def lines_in_context(windows: Iterable[list[str]], size: int, parts: int) -> Iterator[list[str]]:
    """The lines of documents, each with its context. A line with all `parts`, which tabs separate, states its own."""
    context = DocumentContext(size)

    def complete(line: str) -> str:
        stated = line.count("\t") >= parts - 1
        found = context.add_to(without_context(line) if stated else line)
        return line if stated else found

    return (list(map(complete, lines)) for lines in windows)


def examples_in_context(examples: Iterable[Example], size: int, column: str | None, parts: int) -> Iterator[Example]:
    """The examples, each with its context. A tab inside a source of one part is white space.

    A document ends at a blank line, which is left out, or where `column` changes.
    """
    context, document = DocumentContext(size), None
    for example in examples:
        if column is not None and column not in example.extra:
            where = f"{example.file}:{example.line}"
            raise InputError(f"no {column!r}, the document", where=where, remedy=nearest(column, example.extra))
        if not example.source.strip() and not example.target:
            context.clear()
            continue
        if column is not None and example.extra[column] != document:
            context.clear()
            document = example.extra[column]
        source = example.source.replace("\t", " ") if parts == 1 else example.source
        yield replace(example, source=context.add_to(source), extra={**example.extra, CONTEXT: str(size)})


class AlignmentError(ValueError):
    """An invalid word alignment."""


def parse_alignment(text: str) -> list[Link]:
    matches = [re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", item) for item in text.split()]
    if None in matches:
        raise AlignmentError(f"cannot read {text.split()[matches.index(None)][:40]!r}: links are written 0-0 1-2")
    return [(int(match[1]), int(match[2])) for match in matches if match is not None]


def check_alignment(text: str, source: str, target: str) -> None:
    """Raises an error where a link refers to a word that does not exist."""
    words = [len(Tokenizer.word_spans(side)) for side in (source, target)]
    for link in parse_alignment(text):
        for word, count, side in zip(link, words, ("source", "target"), strict=True):
            if word >= count:
                raise AlignmentError(f"{link[0]}-{link[1]} links word {word} of a {side} of {count} words, from 0")


def token_alignment(alignment: str, source: str, target: str, tokenizers: tuple[Tokenizer, Tokenizer]) -> list[Link]:
    """Links of words -> links of tokens: all tokens of one word with all tokens of the other."""
    encodings = (tokenizers[0].encode_source(source), source), (tokenizers[1].encode(target), target)
    sides: list[dict[int, list[int]]] = []
    for (encoding, text), suffix in zip(encodings, (len(tokenizers[0].suffix), 0), strict=True):
        tokens: dict[int, list[int]] = {}
        for position, word in enumerate(Tokenizer.word_ids(encoding, text)[: len(encoding.ids) - suffix]):
            if encoding.ids[position] != EOS:  # it separates the parts of a source and belongs to no word
                tokens.setdefault(word, []).append(position)
        sides.append(tokens)
    links = parse_alignment(alignment)
    return [(s, t) for one, other in links for s in sides[0].get(one, []) for t in sides[1].get(other, [])]
