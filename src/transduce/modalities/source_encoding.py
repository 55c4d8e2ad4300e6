"""Sources as they were given in, the sources of a batch out, and back: what each row of a memory stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transduce.contracts import Encoder, VisualSource
from transduce.data.batching import collate
from transduce.data.tokenizers.oov import encode_sources, oov_words
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import Batch
from transduce.modalities.sources import ModalitySource, SourceItem

NO_WORD = -1  # the word of a token that belongs to no word, such as </s>
EncodedSource = Any  # what was read of one source; it has a length
T = TypeVar("T")


@dataclass(frozen=True)
class SourceLabels:
    """What the rows of a memory stand for, in words and for the eye."""

    tokens: Sequence[str]
    words: Sequence[int]  # token -> word, -1: none
    labels: Sequence[str]  # the words
    scenes: Sequence[VisualSource] = ()


class SourceEncoding(ABC):
    """How the sources of one model are read."""

    @abstractmethod
    def read(self, texts: Sequence[str]) -> list[EncodedSource]: ...

    @abstractmethod
    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        """Sources, and targets where they are given, as one batch."""

    @abstractmethod
    def tell(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        """What each row of the memory stands for that this encoder makes of a source."""

    def found(self, place: str) -> list[str]:
        """The sources that a file or folder itself stands for; none where it holds lines."""
        return []

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(source) for source in self.read(texts)]

    def cut(self, source: EncodedSource, most: int) -> EncodedSource:
        """No more rows of it than this, where a source can be cut."""
        return source

    def unknown(self, text: str) -> list[str]:
        """The words of a source that only a number stands for: see unknowns.py."""
        return []


class TextSourceEncoding(SourceEncoding):
    """Sources that are texts; `masked`: `<mask>` stands for a token."""

    def __init__(self, tokenizer: Tokenizer, *, masked: bool = False) -> None:
        self._tokenizer, self._masked = tokenizer, masked

    def read(self, texts: Sequence[str]) -> list[EncodedSource]:
        if self._masked:
            return self._tokenizer.encode_sources(texts, masked=True)
        return encode_sources(self._tokenizer, texts)

    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        given = [None] * len(sources) if targets is None else targets
        return collate(list(zip(sources, given, strict=True)), range(len(sources)))

    def tell(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        encoded, count = self._tokenizer.encode_source(text, masked=self._masked), len(source)
        shown = [text[begin:end] or piece for (begin, end), piece in zip(encoded.offsets, encoded.pieces, strict=True)]
        own = len(encoded.ids) - len(self._tokenizer.tail)  # a tail belongs to no word
        words = [word if row < own else NO_WORD for row, word in enumerate(self._tokenizer.word_of(encoded, text))]
        shown, words = self._within(shown, count), [*self._within(words, count), NO_WORD]
        return SourceLabels([*shown, "</s>"], words, [text[begin:end] for begin, end in self._tokenizer.words(text)])

    def cut(self, source: EncodedSource, most: int) -> EncodedSource:
        return self._within(source, most)

    def _within(self, row: Sequence[T], most: int) -> list[T]:
        """A source, or what is said of its tokens, cut to so many: what every source ends with stays."""
        if len(row) <= most:
            return list(row)
        own = max(most - len(self._tokenizer.tail), 0)
        return [*row[:own], *row[len(row) - most + own :]]

    def unknown(self, text: str) -> list[str]:
        return oov_words(self._tokenizer, text)


class ModalitySourceEncoding(SourceEncoding):
    """Sources that are more than one text."""

    def __init__(self, perceived: ModalitySource) -> None:
        self.perceived = perceived

    def read(self, texts: Sequence[str]) -> list[EncodedSource]:
        return list(self.perceived.read_all(texts))

    def found(self, place: str) -> list[str]:
        first, *others = self.perceived.parts.values()
        path = Path(place)
        endings = {ending for part in (first, *others) for ending in part.endings}
        if others and path.suffix.lower() in endings and path.is_file():
            raise InputError(
                f"one file, where this model reads {' and '.join(self.perceived.parts)}",
                where=place,
                remedy="give all in one line with a tab between them, as in $'FILE\\tTEXT'",
            )
        if others or not first.names_files:
            return []
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return [str(one) for one in files if one.suffix.lower() in first.endings and one.is_file()]

    def batch(self, sources: Sequence[EncodedSource], targets: Sequence[Sequence[int]] | None = None) -> Batch:
        begun = Batch(rows=tuple(range(len(sources))))
        if targets is not None:
            begun = collate([(None, target) for target in targets], range(len(sources)))
        return self.perceived.onto(begun, sources)

    def tell(self, text: str, source: EncodedSource, encoder: Encoder | None) -> SourceLabels:
        assert isinstance(source, SourceItem)
        assert encoder is not None, "what is perceived is read by an encoder"
        grids, leading = encoder.grids(source.rows), encoder.leading()
        labels = self.perceived.labels(source, grids, leading)
        return SourceLabels(labels, range(len(labels)), labels, self.perceived.scenes(source, grids, leading))
