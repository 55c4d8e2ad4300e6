"""Source encoding of a model: texts or files to batches, and labels for the rows of the memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from transduce.contracts import Encoder, VisualSource
from transduce.data.batching import collate
from transduce.data.tokenizers.tokenizer import Tokenizer, encode_sources, oov_words
from transduce.errors import InputError
from transduce.flow import Batch
from transduce.modalities.sources import ModalitySource, SourceItem, TextModality

NO_WORD = -1  # the word of a token that belongs to no word, such as </s>
EncodedSource = Any  # one source as token ids or as a `SourceItem`; it has a length
T = TypeVar("T")


@dataclass(frozen=True)
class SourceLabels:
    """Labels and pixels for the rows of a memory."""

    tokens: Sequence[str]
    words: Sequence[int]  # token -> word, or NO_WORD
    labels: Sequence[str]  # the words
    visuals: Sequence[VisualSource] = ()


class SourceEncoding(ABC):
    """How the sources of one model are read and collated."""

    reads_text: bool = False  # True: a source is one text

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[EncodedSource]: ...

    def encode_ahead(self, texts: Sequence[str]) -> None:  # noqa: B027
        """Encodes texts together for which `encode` is then called one by one, where that takes less time."""

    @abstractmethod
    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        """Sources, and targets where they are given, as one batch."""

    @abstractmethod
    def describe(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        """Labels for the rows of the memory that this encoder computes from a source."""

    def sources_in(self, path: str) -> list[str]:
        """The sources that a file or folder itself represents; empty where it contains lines of text."""
        return []

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(source) for source in self.encode(texts)]

    def truncate(self, source: EncodedSource, max_length: int) -> EncodedSource:
        """At most `max_length` rows of a source, where a source can be truncated."""
        return source

    def oov_words(self, text: str) -> list[str]:
        """The words of a source that have an OOV placeholder: see data/tokenizers/tokenizer.py."""
        return []


class TextSourceEncoding(SourceEncoding):
    """Sources that are texts; `masked`: `<mask>` stands for a token to predict; `separated`: tabs separate parts."""

    reads_text = True

    def __init__(self, tokenizer: Tokenizer, *, masked: bool = False, separated: bool = True) -> None:
        self._tokenizer, self._masked, self._separated = tokenizer, masked, separated
        self._ahead: dict[str, EncodedSource] = {}

    def encode_ahead(self, texts: Sequence[str]) -> None:
        self._ahead = dict(zip(texts, self._encode(texts), strict=True))

    def encode(self, texts: Sequence[str]) -> list[EncodedSource]:
        if len(texts) == 1 and (found := self._ahead.pop(texts[0], None)) is not None:
            return [found]
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[EncodedSource]:
        if self._masked:
            return self._tokenizer.encode_sources(texts, masked=True)
        return encode_sources(self._tokenizer, texts, separated=self._separated)

    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        given = [None] * len(sources) if targets is None else targets
        return collate(list(zip(sources, given, strict=True)), range(len(sources)))

    def describe(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        encoding = self._tokenizer.encode_source(text, masked=self._masked, separated=self._separated)
        length = len(source)
        tokens = [
            text[begin:end] or piece for (begin, end), piece in zip(encoding.offsets, encoding.pieces, strict=True)
        ]
        own = len(encoding.ids) - len(self._tokenizer.suffix)  # the suffix belongs to no word
        words = [word if row < own else NO_WORD for row, word in enumerate(self._tokenizer.word_ids(encoding, text))]
        tokens, words = self._truncate(tokens, length), [*self._truncate(words, length), NO_WORD]
        labels = [text[begin:end] for begin, end in self._tokenizer.word_spans(text)]
        return SourceLabels([*tokens, "</s>"], words, labels)

    def truncate(self, source: EncodedSource, max_length: int) -> EncodedSource:
        return self._truncate(source, max_length)

    def _truncate(self, row: Sequence[T], max_length: int) -> list[T]:
        """The first values of the tokens of a source; the suffix that ends every source is kept."""
        if len(row) <= max_length:
            return list(row)
        own = max(max_length - len(self._tokenizer.suffix), 0)
        return [*row[:own], *row[len(row) - max_length + own :]]

    def oov_words(self, text: str) -> list[str]:
        return oov_words(self._tokenizer, text)


class ModalitySourceEncoding(SourceEncoding):
    """Sources of one or more modalities."""

    def __init__(self, source: ModalitySource) -> None:
        self.source = source

    def encode(self, texts: Sequence[str]) -> list[EncodedSource]:
        return list(self.source.read_all(texts))

    def sources_in(self, path: str) -> list[str]:
        first, *others = self.source.parts.values()
        location = Path(path)
        extensions = {extension for modality in (first, *others) for extension in modality.extensions}
        if others and location.suffix.lower() in extensions and location.is_file():
            raise InputError(
                f"one file, but this model reads {' and '.join(self.source.parts)}",
                where=path,
                remedy="give all sources in one line with a tab between them, as in $'FILE\\tTEXT'",
            )
        if others or isinstance(first, TextModality):
            return []
        files = sorted(location.rglob("*")) if location.is_dir() else [location]
        return [str(file) for file in files if file.suffix.lower() in first.extensions and file.is_file()]

    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        batch = Batch(rows=tuple(range(len(sources))))
        if targets is not None:
            batch = collate([(None, target) for target in targets], range(len(sources)))
        return self.source.add_to(batch, sources)

    def describe(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        assert isinstance(source, SourceItem)
        assert encoder is not None, "sources of a modality are read by an encoder"
        grids, leading = encoder.grids(source.rows), encoder.leading()
        labels = self.source.position_labels(source, grids, leading)
        return SourceLabels(labels, range(len(labels)), labels, self.source.visualise(source, grids, leading))


@dataclass(frozen=True)
class EnsembleSource:
    """One source as each encoding of an ensemble reads it; its length is that of the longest."""

    each: tuple[EncodedSource, ...]

    def __len__(self) -> int:
        return max(map(len, self.each))


class EnsembleSourceEncoding(SourceEncoding):
    """Sources of an ensemble whose members have different tokens. Labels are those of the first encoding.

    A batch holds the sources of the first encoding as any batch does, and in `extra`, by number, those of all.
    """

    def __init__(self, encodings: Sequence[SourceEncoding]) -> None:
        self.encodings = encodings
        self.reads_text = all(one.reads_text for one in encodings)

    def encode(self, texts: Sequence[str]) -> list[EncodedSource]:
        rows = zip(*(one.encode(texts) for one in self.encodings), strict=True)
        return [EnsembleSource(row) for row in rows]

    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        columns = list(zip(*(source.each for source in sources), strict=True))
        first, *others = (one.batch(rows) for one, rows in zip(self.encodings, columns, strict=True))
        extra = {f"0/{name}": part for name, part in first.extra.items()}
        for number, other in enumerate(others, 1):
            assert other.source is not None, "an encoder reads a source"
            extra |= {f"{number}/": other.source, **{f"{number}/{name}": one for name, one in other.extra.items()}}
        if targets is not None:
            first = replace(first, target=collate([(None, one) for one in targets], first.rows).target)
        return replace(first, extra=extra)

    def describe(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        return self.encodings[0].describe(text, source.each[0], encoder)

    def sources_in(self, path: str) -> list[str]:
        return self.encodings[0].sources_in(path)

    def truncate(self, source: EncodedSource, max_length: int) -> EncodedSource:
        parts = zip(self.encodings, source.each, strict=True)
        return EnsembleSource(tuple(one.truncate(part, max_length) for one, part in parts))

    def oov_words(self, text: str) -> list[str]:
        return self.encodings[0].oov_words(text)


def member_batch(batch: Batch, number: int) -> Batch:
    """The batch as one encoding of an `EnsembleSourceEncoding` would have made it."""
    named = {name.partition("/")[2]: part for name, part in batch.extra.items() if name.startswith(f"{number}/")}
    return replace(batch, source=named.pop("", batch.source), extra=named)
