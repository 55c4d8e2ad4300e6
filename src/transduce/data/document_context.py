"""Document context: the preceding sentences of a document as one more part of each source."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from transduce.data.languages import split_language
from transduce.errors import InputError, nearest
from transduce.flow import Example

CONTEXT = "context"  # the key in `Example.extra` of the number of sentences


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
