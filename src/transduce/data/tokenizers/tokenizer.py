"""Text <-> ids, with the place of every token in the raw text."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from transduce.data.tokenizers import vocabulary as vocabularies
from transduce.data.tokenizers.bpe_dropout import BPEDropout
from transduce.data.tokenizers.vocabulary import Vocabulary
from transduce.errors import InputError, nearest
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.storage import replace_file

_WORD = re.compile(r"\S+")
_TAB = re.compile("\t")
MASK = "<mask>"  # what a user writes for a token to be filled in; the model reads <unk>


@dataclass(frozen=True)
class Encoding:
    """A text in tokens; no special ones are added."""

    ids: list[int]
    pieces: list[str]  # for the eye: a space is shown as ▁
    offsets: list[tuple[int, int]]  # characters of the raw text, from and to


class Tokenizer:
    """One vocabulary at work. Text that looks like a special token ("</s>") is text like any other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._backend = vocabularies.backend(vocabulary)
        self._spaced = vocabulary.kind in ("bpe", "unigram")  # reads every text with a space in front
        self._own: dict[int, int] = {}  # given: the library's number -> ours
        if vocabulary.kind == vocabularies.GIVEN:
            # A row that stands there twice (a first token that is </s> too) is read as the later special.
            special = sorted(enumerate(vocabulary.rows[: len(SPECIALS)]), key=lambda pair: pair[0] == BOS, reverse=True)
            plain = enumerate(vocabulary.rows[len(SPECIALS) :], len(SPECIALS))
            self._own = {theirs: ours for ours, theirs in (*plain, *special)}
            self._content = [piece.encode() for piece in vocabulary.pieces[len(SPECIALS) :]]
        elif vocabulary.kind in ("bpe", "unigram", "bytes"):
            byte_of = {letter: byte for byte, letter in enumerate(vocabularies.byte_letters())}
            pieces = vocabulary.pieces[len(SPECIALS) :]
            self._content = [bytes(byte_of[letter] for letter in piece) for piece in pieces]
        else:
            self._content = [piece.encode() for piece in vocabulary.pieces[len(SPECIALS) :]]
        # <unk> stands for text that was there: it is shown, while <pad>, <s> and </s> say nothing.
        self._content = [b"", b"", b"", SPECIALS[UNK].encode(), *self._content]

    @classmethod
    def train(cls, texts: Iterable[str], kind: str, size: int, min_count: int = 1, oov_placeholders: int = 0) -> Self:
        """Learns at most `size` pieces, specials included (`bytes`, `bpe`, `unigram`: never fewer than 260), and
        `oov_placeholders` placeholders more (`words` only)."""
        if kind == vocabularies.GIVEN:
            raise InputError(
                "given tokens are those of an imported run, and cannot be trained",
                remedy="begin from such a run: init.model=RUN, with its tokens as they are; or choose another kind",
            )
        if kind not in vocabularies.KINDS:
            raise InputError(f"unknown kind of tokens {kind!r}", remedy=nearest(kind, vocabularies.KINDS))
        if oov_placeholders and kind != "words":
            raise InputError(f"out-of-vocabulary placeholders stand for words, not {kind}", remedy="set `kind: words`")
        return cls(vocabularies.train(texts, kind, size, min_count, oov_placeholders))

    @property
    def kind(self) -> str:
        return self.vocabulary.kind

    @property
    def size(self) -> int:
        return len(self.vocabulary.pieces)

    def __len__(self) -> int:
        return self.size

    @property
    def lead(self) -> tuple[int, ...]:
        """What every text of an imported vocabulary begins with; nothing where we trained it."""
        return self.vocabulary.lead

    @property
    def tail(self) -> tuple[int, ...]:
        """What every source of an imported vocabulary ends with, before our </s>; mostly nothing."""
        return self.vocabulary.tail

    @property
    def oov_placeholders(self) -> int:
        return self.vocabulary.oov_placeholders

    @property
    def numbers(self) -> range:
        """The ids of the out-of-vocabulary placeholders: <unk1> is the first."""
        return range(len(SPECIALS), self.vocabulary.unspoken)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(vocabularies.to_json(self.vocabulary).encode()).hexdigest()

    def piece(self, number: int) -> str:
        """One token for the eye; bytes that are no whole character are written as \\xe2."""
        if number < len(SPECIALS):
            return SPECIALS[number]
        return self._content[number].decode("utf-8", "backslashreplace").replace(" ", "▁")

    @cached_property
    def starts(self) -> list[bool]:
        """Which ids begin a word, where that can be told from the id alone: not for characters and bytes."""
        if self.kind == vocabularies.GIVEN:
            marks = ("\u2581", "\u0120")  # of a space, in pieces of SentencePiece and of bytes
            marked = any(piece.startswith(marks) for piece in self.vocabulary.pieces)
            pieces = self.vocabulary.pieces[len(SPECIALS) :]
            return [False] * len(SPECIALS) + [
                piece.startswith(marks) if marked else not piece.startswith("##") for piece in pieces
            ]
        if self._spaced:
            return [content[:1] == b" " and content != b" " for content in self._content]
        words = self.kind in ("words", "labels")
        return [
            words and (number == UNK or (number >= len(SPECIALS) and not content.isspace()))
            for number, content in enumerate(self._content)
        ]

    def encode(self, text: str) -> Encoding:
        result = self._backend.encode(text, add_special_tokens=False)
        ids = self._numbers(result.ids)
        return Encoding(ids, [self.piece(number) for number in ids], result.offsets)

    def _numbers(self, ids: list[int]) -> list[int]:
        """Ours for those of the library, which are the same but in a given tokenizer."""
        return [self._own.get(number, UNK) for number in ids] if self._own else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._numbers(result.ids) for result in found]

    def encode_source(self, text: str, *, masked: bool = False) -> Encoding:
        """A source, whose parts are separated by tabs: each tab becomes </s>, and every part is read by itself.

        With `masked`, it is one text, in which each `<mask>` stands for a token and becomes <unk>. Where tokens are
        words or begin with their space, the space on either side of the mask goes with it.
        """
        lead = list(self.lead)
        result = Encoding(lead, [self.piece(number) for number in lead], [(0, 0)] * len(lead))
        mark, number = self._mark(masked)
        for begin, end, after in _between(text, mark):
            part = self.encode(text[begin:end])
            result.ids.extend(part.ids)
            result.pieces.extend(part.pieces)
            result.offsets.extend((start + begin, stop + begin) for start, stop in part.offsets)
            if after is not None:
                result.ids.append(number)
                result.pieces.append(SPECIALS[number])
                result.offsets.append((end, after))
        result.ids.extend(self.tail)
        result.pieces.extend(map(self.piece, self.tail))
        result.offsets.extend([(len(text), len(text))] * len(self.tail))
        return result

    def _mark(self, masked: bool) -> tuple[re.Pattern[str], int]:
        """What stands between the stretches of a text that are read by themselves, and the id it becomes."""
        if not masked:
            return _TAB, EOS
        if self.kind == vocabularies.GIVEN and any(piece.startswith("\u0120") for piece in self.vocabulary.pieces):
            return re.compile(f" ?{MASK}"), UNK  # the space after it belongs to the piece after it
        return re.compile(MASK if self.kind in ("chars", "bytes") else f" ?{MASK} ?"), UNK

    def encode_sources(self, texts: Sequence[str], *, masked: bool = False) -> list[list[int]]:
        mark, number = self._mark(masked)
        parts = [[text[begin:end] for begin, end, _ in _between(text, mark)] for text in texts]
        encoded = iter(self.encode_batch([part for row in parts for part in row]))
        rows = []
        for row in parts:
            ids = [*self.lead, *next(encoded)]
            for _ in row[1:]:
                ids = [*ids, number, *next(encoded)]
            rows.append([*ids, *self.tail])
        return rows

    def decode(self, ids: Iterable[int], unknown: Sequence[str] = ()) -> str:
        """The text again, to the letter. What was <unk> is written `<unk>`: nothing is left out in silence.

        `unknown` are the words that out-of-vocabulary placeholders stand for, the first for <unk1>.
        """
        if self.kind == vocabularies.GIVEN:
            return self._library_text(ids)
        if self.kind == "words":
            return self._join_words(ids, dict(zip(self.numbers, unknown, strict=False)))
        text = b"".join(self._content[number] for number in ids).decode("utf-8", "replace")
        return text[1:] if self._spaced and text.startswith(" ") else text

    def _library_text(self, ids: Iterable[int]) -> str:
        """As the library puts a text together; its special tokens and pieces it does not have say nothing."""
        rows = [self.vocabulary.rows[number] for number in ids if number not in (PAD, BOS, EOS)]
        text: str = self._backend.decode([row for row in rows if row >= 0], skip_special_tokens=True)
        return text.replace("\0", "")  # which marks pieces that no text can spell

    def _join_words(self, ids: Iterable[int], unknown: Mapping[int, str]) -> str:
        parts: list[str] = []
        after_word = False
        for number in ids:
            if part := unknown.get(number) or self._content[number].decode():
                is_word = not part.isspace()
                parts.append(f" {part}" if is_word and after_word else part)
                after_word = is_word
        return "".join(parts)

    def encode_dropout(self, text: str, rate: float, generator: random.Random, *, parts: bool = False) -> list[int]:
        """BPE that leaves out each merge with probability `rate` (Provilkov et al. 2020), from a given generator.

        With `parts`, the text is a source: see `encode_source`.
        """
        if parts and "\t" in text:
            begin, _, rest = text.partition("\t")
            first = self.encode_dropout(begin, rate, generator)
            return [*first, EOS, *self.encode_dropout(rest, rate, generator, parts=True)]
        if self.kind != "bpe":
            raise InputError(f"dropout of merges needs bpe, not {self.kind}", remedy="set `dropout: 0` or `kind: bpe`")
        words = self._backend.pre_tokenizer.pre_tokenize_str(self._backend.normalizer.normalize_str(text))
        return [number for word, _ in words for number in self._merges(word, rate, generator)]

    @cached_property
    def _merges(self) -> BPEDropout:
        return BPEDropout(self.vocabulary)

    @staticmethod
    def words(text: str) -> list[tuple[int, int]]:
        """Where the words of the raw text stand, as white space separates them."""
        return [match.span() for match in _WORD.finditer(text)]

    @staticmethod
    def word_of(tokens: Encoding | Sequence[tuple[int, int]], text: str) -> list[int]:
        """The word each token belongs to; white space belongs to the word after it, or to the last (-1: no word)."""
        offsets = tokens.offsets if isinstance(tokens, Encoding) else tokens
        words = Tokenizer.words(text)
        at = [len(words) - 1] * (len(text) + 1)
        position = 0
        for number, (_, end) in enumerate(words):
            at[position:end] = [number] * (end - position)
            position = end
        return [at[start] for start, _ in offsets]

    def save(self, path: str | Path) -> None:
        """One JSON file, complete or not there at all."""
        replace_file(Path(path), vocabularies.to_json(self.vocabulary).encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            return cls(vocabularies.from_json(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise InputError("no such tokenizer file", where=str(path)) from None
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"not a tokenizer: {error}", where=str(path), remedy="restore the file") from None


def _between(text: str, mark: re.Pattern[str]) -> Iterator[tuple[int, int, int | None]]:
    """The stretches between the marks, empty ones too: from, to, and where the mark after it ends, if there is one."""
    begin = 0
    for found in mark.finditer(text):
        yield begin, found.start(), found.end()
        begin = found.end()
    yield begin, len(text), None
