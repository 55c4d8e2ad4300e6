"""Tokenizer: text to ids with character offsets, and back; OOV placeholders; running text in chunks.

The j-th distinct unknown word of a source is <unkj>, in the source and in its target (Luong et al. 2015). So unseen
words can be copied: decoding replaces the placeholders of a prediction by the words of its source. An unknown word of a
target that its source does not contain stays <unk>, as does a word beyond the last placeholder. Ids depend on the pair
alone.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from transduce.data.languages import split_language, tag_of
from transduce.data.tokenizers import normalisation as normalisations
from transduce.data.tokenizers import vocabulary as vocabularies
from transduce.data.tokenizers.vocabulary import TAG_MARK, BPEDropout, Vocabulary, run_library, split_tags
from transduce.errors import InputError, nearest
from transduce.flow import BOS, EOS, PAD, SPECIALS, UNK
from transduce.storage import replace_file

_WORD = re.compile(r"\S+")
_TAB = re.compile("\t")
_NEVER = re.compile(r"(?!)")
SPACE_MARKS = ("\u2581", "\u0120")  # a space in SentencePiece and in byte-level pieces
MASK = "<mask>"  # how a user writes a masked token; the model reads <unk>
_CONTEXT = "x"  # any letter: a line feed never merges with the letter before it


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text, without special tokens."""

    ids: list[int]
    pieces: list[str]  # for display: a space is shown as ▁
    offsets: list[tuple[int, int]]  # character spans in the raw text


class KnownPieces(dict[int, str]):
    """Tokens for display by id, each made when it is first wanted: making one takes longer than finding it."""

    def __init__(self, make: Callable[[int], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> str:
        self[number] = self._make(number)
        return self[number]


class Tokenizer:
    """Encodes and decodes text with one vocabulary. Text that looks like a special token ("</s>") is ordinary text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._backend = vocabularies.backend(vocabulary)
        self._spaced = vocabulary.kind in ("bpe", "unigram")  # every text is read with a space prepended
        self._id_of_backend: dict[int, int] = {}  # given: id of the library -> id here
        if vocabulary.kind == vocabularies.GIVEN:
            # An id that occurs twice (a first token that is </s> too) is read as the later special token.
            special = sorted(
                enumerate(vocabulary.backend_ids[: len(SPECIALS)]), key=lambda pair: pair[0] == BOS, reverse=True
            )
            plain = enumerate(vocabulary.backend_ids[len(SPECIALS) :], len(SPECIALS))
            self._id_of_backend = {theirs: ours for ours, theirs in (*plain, *special)}
            self._content = [piece.encode() for piece in vocabulary.pieces[len(SPECIALS) :]]
        elif vocabulary.kind in ("bpe", "unigram", "bytes"):
            byte_of = {letter: byte for byte, letter in enumerate(vocabularies.byte_letters())}
            pieces = vocabulary.pieces[len(SPECIALS) :]
            self._content = [bytes(byte_of[letter] for letter in piece) for piece in pieces]
        else:
            self._content = [piece.encode() for piece in vocabulary.pieces[len(SPECIALS) :]]
        # <unk> replaces text, so it is shown; <pad>, <s> and </s> have no text.
        self._content = [b"", b"", b"", SPECIALS[UNK].encode(), *self._content, *[b""] * len(vocabulary.languages)]
        self._displayed = KnownPieces(self._make_piece)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        kind: str,
        size: int,
        min_count: int = 1,
        oov_placeholders: int = 0,
        normalisation: Sequence[str] = (),
    ) -> Self:
        """Learns at most `size` pieces, specials included (`bytes`, `bpe`, `unigram`: never fewer than 260), and
        `oov_placeholders` more (`words` only), from texts after the steps of the normalisation."""
        if kind == vocabularies.GIVEN:
            raise InputError(
                "`kind: given` is the tokenizer of an imported run, and cannot be trained",
                remedy="initialise from such a run, which provides it: init.model=RUN; or choose another kind",
            )
        if kind not in vocabularies.KINDS:
            raise InputError(f"unknown kind of tokens {kind!r}", remedy=nearest(kind, vocabularies.KINDS))
        if oov_placeholders and kind != "words":
            raise InputError(f"out-of-vocabulary placeholders stand for words, not {kind}", remedy="set `kind: words`")
        steps = tuple(normalisation)
        read = (normalisations.apply(text, steps) for text in texts) if steps else texts
        vocabulary = vocabularies.train(read, kind, size, min_count, oov_placeholders)
        return cls(replace(vocabulary, normalisation=steps))

    def with_tags(self, texts: Iterable[str]) -> Tokenizer:
        """The same tokenizer of characters, with a piece for every tag in these texts."""
        if self.kind != "chars":
            raise InputError(
                f"tags are pieces beside characters, not {self.kind}", remedy="set tokens.source.kind: chars"
            )
        tags = {f"{TAG_MARK}{tag}" for text in texts for tag in split_tags(text)}
        pieces = (*self.vocabulary.pieces, *sorted(tags.difference(self.vocabulary.pieces)))
        return Tokenizer(replace(self.vocabulary, pieces=pieces))

    def with_cls(self, wanted: bool) -> Tokenizer:
        """The same tokenizer, with <s> before every text, or without. An imported one has a prefix of its own."""
        prefix = (BOS,) if wanted else ()
        if self.kind == vocabularies.GIVEN or prefix == self.prefix:
            return self
        return Tokenizer(replace(self.vocabulary, prefix=prefix))

    def with_word_marks(self, marked: bool) -> Tokenizer:
        """The same tokenizer, whose ids also tell which pieces continue a word, for labels of words; or without.

        WordPiece splits `n't` into `n`, `'` and `t`, pieces that look like words. With marks, the id of such a piece
        within a word is raised by `size`, and a word without any piece is <unk>. Pieces with a mark for spaces need
        none, nor do trained vocabularies.
        """
        marked = marked and self.kind == vocabularies.GIVEN and not self._marks_spaces
        changed = replace(self.vocabulary, word_marks=marked)
        return self if changed == self.vocabulary else Tokenizer(changed)

    def with_languages(self, languages: Iterable[str]) -> Tokenizer:
        """The same tokenizer with a tag for every language."""
        if self.kind == vocabularies.GIVEN:
            raise InputError(
                "an imported tokenizer has its own tags of languages", remedy="leave out `language` of the corpora"
            )
        return Tokenizer(replace(self.vocabulary, languages=tuple(sorted(set(languages)))))

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that a source may be tagged with."""
        return self.vocabulary.languages

    @property
    def kind(self) -> str:
        return self.vocabulary.kind

    @property
    def size(self) -> int:
        return len(self.vocabulary.pieces) + len(self.vocabulary.languages)

    def __len__(self) -> int:
        return self.size

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids at the beginning of every text: of an imported vocabulary its own, else <s> or none."""
        return self.vocabulary.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids at the end of every source of an imported vocabulary, before our </s>; mostly empty."""
        return self.vocabulary.suffix

    @property
    def normalisation(self) -> tuple[str, ...]:
        """The steps before tokenisation, which `decode` undoes."""
        return self.vocabulary.normalisation

    @property
    def oov_placeholders(self) -> int:
        return self.vocabulary.oov_placeholders

    @property
    def oov_ids(self) -> range:
        """The ids of the out-of-vocabulary placeholders: <unk1> is the first."""
        return range(len(SPECIALS), self.vocabulary.reserved)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(vocabularies.to_json(self.vocabulary).encode()).hexdigest()

    def piece(self, number: int) -> str:
        """One token for display; bytes that are no complete character are written as \\xe2."""
        return self._displayed[number]

    def pieces(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Tokens for display."""
        return tuple(map(self._displayed.__getitem__, ids))

    def _make_piece(self, number: int) -> str:
        number %= len(self._content)  # without its word mark
        if number < len(SPECIALS):
            return SPECIALS[number]
        if number >= len(self.vocabulary.pieces):
            return tag_of(self.languages[number - len(self.vocabulary.pieces)])
        return self._content[number].decode("utf-8", "backslashreplace").replace(" ", "▁")

    @cached_property
    def _marks_spaces(self) -> bool:
        """Whether the pieces of an imported vocabulary begin with the spaces before them."""
        return any(piece.startswith(SPACE_MARKS) for piece in self.vocabulary.pieces)

    @cached_property
    def word_starts(self) -> list[bool]:
        """Which ids begin a word, where the id determines it: not for characters and bytes."""
        if self.kind == vocabularies.GIVEN:
            marked, pieces = self._marks_spaces, self.vocabulary.pieces[len(SPECIALS) :]
            # Without a mark for spaces, <unk> stands for a whole word.
            starts = [False, False, False, not marked] + [
                piece.startswith(SPACE_MARKS) if marked else not piece.startswith("##") for piece in pieces
            ]
            return starts + [False] * (self.size * self.vocabulary.word_marks)
        if self._spaced:
            return [content[:1] == b" " for content in self._content]
        words = self.kind in ("words", "labels")
        return [
            words and (number == UNK or (number >= len(SPECIALS) and bool(content) and not content.isspace()))
            for number, content in enumerate(self._content)
        ]

    def encode(self, text: str) -> Encoding:
        if not self.normalisation:
            result = run_library(self._backend.encode, text, add_special_tokens=False)
            ids, offsets = self._own_ids(result.ids), result.offsets
            if self.vocabulary.word_marks:
                ids, offsets = self._with_marks(ids, offsets, text)
        else:
            read = normalisations.aligned(text, self.normalisation)
            result = run_library(self._backend.encode, read.text, add_special_tokens=False)
            ids, offsets = self._own_ids(result.ids), [read.raw_span(*span) for span in result.offsets]
        return Encoding(ids, [self.piece(number) for number in ids], offsets)

    def _own_ids(self, ids: list[int]) -> list[int]:
        """Ids here for ids of the library; they differ only in a given tokenizer."""
        return [self._id_of_backend.get(number, UNK) for number in ids] if self._id_of_backend else ids

    def _with_marks(
        self, ids: list[int], offsets: list[tuple[int, int]], text: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets with word marks: see `with_word_marks`."""
        pieces: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in self.word_spans(text)]
        for number, span, index in zip(ids, offsets, self.word_ids(offsets, text), strict=True):
            pieces[index].append((number, span))
        marked: list[tuple[int, tuple[int, int]]] = []
        for word, span in zip(pieces, self.word_spans(text), strict=True):
            marked += word[:1] or [(UNK, span)]
            marked += [(number + self.size * self.word_starts[number], inner) for number, inner in word[1:]]
        return [number for number, _ in marked], [span for _, span in marked]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.vocabulary.word_marks:  # the fast function has no offsets
            return [self.encode(text).ids for text in texts]
        read = [normalisations.apply(text, self.normalisation) for text in texts] if self.normalisation else list(texts)
        if len(read) == 1:  # without the threads of the library, whose start takes longer than one text
            results = [run_library(self._backend.encode, read[0], add_special_tokens=False)]
        else:
            results = run_library(self._backend.encode_batch_fast, read, add_special_tokens=False)
        return [self._own_ids(result.ids) for result in results]

    def segmentations(self, text: str, most: int = 1000) -> list[list[int]]:
        """The usual tokens of a text, then the others that decode to it, short sequences first; at most `most`.

        Pieces of `bpe` and `unigram` alone have several; those of an imported vocabulary are not compared.
        """
        found = [usual] = self.encode_batch([text])
        if not self._spaced or UNK in usual:
            return found
        content = f" {normalisations.apply(text, self.normalisation)}".encode()
        prefixes: list[tuple[int, list[int]]] = [(0, [])]
        while prefixes and len(found) < most:
            extended = []
            for start, ids in prefixes[:most]:
                for end in range(start + 1, len(content) + 1):
                    if (number := self._id_of_content.get(content[start:end])) is not None:
                        extended.append((end, [*ids, number]))
            found += [ids for end, ids in extended if end == len(content) and ids != usual]
            prefixes = [one for one in extended if one[0] < len(content)]
        return found[:most]

    @cached_property
    def _id_of_content(self) -> dict[bytes, int]:
        return {content: number for number, content in enumerate(self._content) if number >= len(SPECIALS) and content}

    def encode_tags(self, text: str) -> list[int]:
        """The ids of the tags in a text such as `V;IND;3;SG`; an unknown tag is <unk>."""
        return [self._id_of_tag.get(f"{TAG_MARK}{tag}", UNK) for tag in split_tags(text)]

    @cached_property
    def _id_of_tag(self) -> dict[str, int]:
        first = len(SPECIALS)
        return {piece: number for number, piece in enumerate(self.vocabulary.pieces) if number >= first}

    def _split_language(self, text: str) -> tuple[list[int], int]:
        """The tag at the beginning of a source, if these sources have tags, and where the text after it begins."""
        language, rest = split_language(text) if self.languages else (None, text)
        if language is None:
            return [], 0
        if language not in self.languages:
            raise InputError(f"this vocabulary has no language {language!r}", remedy=nearest(language, self.languages))
        return [len(self.vocabulary.pieces) + self.languages.index(language)], len(text) - len(rest)

    def separates(self, columns: int) -> bool:
        """Whether a tab separates the parts of sources of so many columns; in an imported vocabulary it is text."""
        return columns > 1 or self.kind != vocabularies.GIVEN

    def encode_source(self, text: str, *, masked: bool = False, separated: bool = True) -> Encoding:
        """A source whose parts are separated by tabs: each tab becomes </s>, and every part is encoded separately.

        Without `separated` a tab is text like any other. With `masked`, it is one text in which each `<mask>` becomes
        <unk>. Where tokens are words or begin with a space, the spaces around the mask are removed with it.
        """
        tag, first = self._split_language(text)
        prefix = [*self.prefix, *tag]
        spans = [*[(0, 0)] * len(self.prefix), *[(0, first)] * len(tag)]
        result = Encoding(prefix, [self.piece(number) for number in prefix], spans)
        separator, number = self._separator(masked, separated)
        for begin, end, after in _between(text, separator):
            begin = max(begin, first)
            part = self.encode(text[begin:end])
            result.ids.extend(part.ids)
            result.pieces.extend(part.pieces)
            result.offsets.extend((start + begin, stop + begin) for start, stop in part.offsets)
            if after is not None:
                result.ids.append(number)
                result.pieces.append(SPECIALS[number])
                result.offsets.append((end, after))
        result.ids.extend(self.suffix)
        result.pieces.extend(map(self.piece, self.suffix))
        result.offsets.extend([(len(text), len(text))] * len(self.suffix))
        return result

    def _separator(self, masked: bool, separated: bool) -> tuple[re.Pattern[str], int]:
        """The separator between the separately encoded parts of a text, and the id it becomes."""
        if not masked:
            return _TAB if separated else _NEVER, EOS
        if self.kind == vocabularies.GIVEN and any(piece.startswith("\u0120") for piece in self.vocabulary.pieces):
            return re.compile(f" ?{MASK}"), UNK  # the space after it belongs to the next piece
        return re.compile(MASK if self.kind in ("chars", "bytes") else f" ?{MASK} ?"), UNK

    def encode_sources(self, texts: Sequence[str], *, masked: bool = False, separated: bool = True) -> list[list[int]]:
        if not masked and not self.languages and not any("\t" in text for text in texts):  # most texts: of one part
            return [[*self.prefix, *ids, *self.suffix] for ids in self.encode_batch(texts)]
        separator, number = self._separator(masked, separated)
        tags = [self._split_language(text) for text in texts]
        parts = [
            [text[max(begin, first) : end] for begin, end, _ in _between(text, separator)]
            for text, (_, first) in zip(texts, tags, strict=True)
        ]
        encoded = iter(self.encode_batch([part for row in parts for part in row]))
        rows = []
        for row, (tag, _) in zip(parts, tags, strict=True):
            ids = [*self.prefix, *tag, *next(encoded)]
            for _ in row[1:]:
                ids = [*ids, number, *next(encoded)]
            rows.append([*ids, *self.suffix])
        return rows

    def decode(self, ids: Iterable[int], oov_words: Sequence[str] = ()) -> str:
        """The exact text. <unk> is written as `<unk>`: nothing is dropped silently.

        `oov_words` are the words of the OOV placeholders, the first for <unk1>.
        """
        if self.kind == vocabularies.GIVEN:
            return self._library_text(ids)
        if self.kind == "words":
            text = self._join_words(ids, dict(zip(self.oov_ids, oov_words, strict=False)))
            return normalisations.undo(text, self.normalisation)
        text = b"".join(self._content[number] for number in ids).decode("utf-8", "replace")
        text = text[1:] if self._spaced and text.startswith(" ") else text
        return normalisations.undo(text, self.normalisation)

    def _library_text(self, ids: Iterable[int]) -> str:
        """The text as the library decodes it; its special tokens and pieces it does not have are omitted."""
        rows = [self.vocabulary.backend_ids[number % self.size] for number in ids if number not in (PAD, BOS, EOS)]
        text = run_library(self._backend.decode, [row for row in rows if row >= 0], skip_special_tokens=True)
        return text.replace("\0", "")  # it marks pieces that no text contains

    def _join_words(self, ids: Iterable[int], oov_words: Mapping[int, str]) -> str:
        ids = list(ids)
        if not oov_words and self._spaces.isdisjoint(ids):  # most texts
            return "".join(map(self._spaced_words.__getitem__, ids))[1:]
        parts: list[str] = []
        after_word, words = False, self._words
        for number in ids:
            if part := oov_words.get(number) or words[number]:
                is_word = not part.isspace()
                parts.append(f" {part}" if is_word and after_word else part)
                after_word = is_word
        return "".join(parts)

    @cached_property
    def _words(self) -> list[str]:
        """The text of every id of `kind: words`."""
        return [content.decode() for content in self._content]

    @cached_property
    def _spaced_words(self) -> list[str]:
        """The same with a space before every word."""
        return [f" {word}" if word else "" for word in self._words]

    @cached_property
    def _spaces(self) -> frozenset[int]:
        """The ids of `kind: words` that are white space."""
        return frozenset(number for number, word in enumerate(self._words) if word.isspace())

    def encode_with_dropout(self, text: str, rate: float, rng: random.Random, *, parts: bool = False) -> list[int]:
        """BPE dropout: skips each merge with probability `rate` (Provilkov et al. 2020).

        With `parts`, the text is a source: see `encode_source`.
        """
        if parts and self.languages:
            tag, after = self._split_language(text)
            if tag:
                return [*tag, *self.encode_with_dropout(text[after:], rate, rng, parts=True)]
        if parts and "\t" in text:
            begin, _, rest = text.partition("\t")
            first = self.encode_with_dropout(begin, rate, rng)
            return [*first, EOS, *self.encode_with_dropout(rest, rate, rng, parts=True)]
        if self.kind != "bpe":
            raise InputError(
                f"BPE dropout needs `kind: bpe`, not {self.kind}", remedy="set `dropout: 0` or `kind: bpe`"
            )
        text = normalisations.apply(text, self.normalisation)
        words = self._backend.pre_tokenizer.pre_tokenize_str(self._backend.normalizer.normalize_str(text))
        return [number for word, _ in words for number in self._bpe_dropout(word, rate, rng)]

    @cached_property
    def _bpe_dropout(self) -> BPEDropout:
        return BPEDropout(self.vocabulary)

    @staticmethod
    def word_spans(text: str) -> list[tuple[int, int]]:
        """The character spans of the words of a text, separated by white space."""
        return [match.span() for match in _WORD.finditer(text)]

    @staticmethod
    def word_ids(tokens: Encoding | Sequence[tuple[int, int]], text: str) -> list[int]:
        """The word of each token; white space belongs to the next word, or to the last one (-1: no word)."""
        offsets = tokens.offsets if isinstance(tokens, Encoding) else tokens
        words = Tokenizer.word_spans(text)
        word_at = [len(words) - 1] * (len(text) + 1)
        position = 0
        for number, (_, end) in enumerate(words):
            word_at[position:end] = [number] * (end - position)
            position = end
        return [word_at[start] for start, _ in offsets]

    def save(self, path: str | Path) -> None:
        """Writes one JSON file atomically."""
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


def _between(text: str, separator: re.Pattern[str]) -> Iterator[tuple[int, int, int | None]]:
    """The spans between separators, empty ones included: begin, end, and the end of the following separator if any."""
    begin = 0
    for match in separator.finditer(text):
        yield begin, match.start(), match.end()
        begin = match.end()
    yield begin, len(text), None


def oov_words(tokenizer: Tokenizer, source: str) -> list[str]:
    """The distinct words of a source that have a placeholder, in order."""
    if not tokenizer.oov_placeholders:
        return []
    encoding = tokenizer.encode_source(source)
    spans = zip(encoding.ids, encoding.offsets, strict=True)
    words = dict.fromkeys(source[begin:end] for number, (begin, end) in spans if number == UNK)
    return [word for word in words if not word.isspace()][: tokenizer.oov_placeholders]


def encode_sources(tokenizer: Tokenizer, texts: Sequence[str], *, separated: bool = True) -> list[list[int]]:
    """The ids of each source, its parts separated by </s>, with placeholders for its unknown words."""
    rows = tokenizer.encode_sources(texts, separated=separated)
    if not tokenizer.oov_placeholders:
        return rows
    return [
        _with_placeholders(tokenizer, text, tokenizer.encode_source(text), text) if UNK in ids else ids
        for ids, text in zip(rows, texts, strict=True)
    ]


def encode_targets(tokenizer: Tokenizer, texts: Sequence[str], sources: Sequence[str]) -> list[list[int]]:
    """The ids of each target, with the placeholders of its source; both sides share one vocabulary."""
    rows = [[*tokenizer.prefix, *ids] for ids in tokenizer.encode_batch(texts)]
    if not tokenizer.oov_placeholders:
        return rows
    return [
        _with_placeholders(tokenizer, text, tokenizer.encode(text), source) if UNK in ids else ids
        for ids, text, source in zip(rows, texts, sources, strict=True)
    ]


def _with_placeholders(tokenizer: Tokenizer, text: str, encoding: Encoding, source: str) -> list[int]:
    placeholder_of = dict(zip(oov_words(tokenizer, source), tokenizer.oov_ids, strict=False))
    return [
        placeholder_of.get(text[begin:end], UNK) if number == UNK else number
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
    ]


def encode_running_text(tokenizer: Tokenizer, chunks: Sequence[str]) -> list[list[int]]:
    """The ids of consecutive chunks of a text (see `readers.corpus.text_chunks`).

    A chunk that continues another one begins with a line feed. It is encoded after a letter, whose ids are removed
    again: a tokenizer that prepends a space to every text must not insert one inside this text.
    """
    skip = len(tokenizer.encode_batch([_CONTEXT])[0])
    continued = [chunk.startswith("\n") for chunk in chunks]
    texts = [_CONTEXT + chunk if follows else chunk for chunk, follows in zip(chunks, continued, strict=True)]
    rows = tokenizer.encode_batch(texts)
    return [ids[skip:] if follows else ids for ids, follows in zip(rows, continued, strict=True)]


@dataclass(frozen=True)
class CountedText:
    """A text as a language model predicts it: <s>, then n ids ending in </s>, with word and character counts.

    The counts allow perplexity per word and bits per character.
    """

    ids: np.ndarray  # n + 1
    words: np.ndarray  # n: words that begin in each predicted token
    characters: np.ndarray  # n: characters of each predicted token


def count_text(tokenizer: Tokenizer, chunks: Iterable[str]) -> CountedText:
    """The ids of a text with word and character counts; </s> counts as one word and one character.

    White space without a token belongs to the next token. A character that spans several tokens counts for the first of
    them: sums over a span that splits a character are off by one, sums over the whole text are exact.
    """
    ids, words, characters = [BOS], [], []
    for chunk in chunks:
        begin = len(_CONTEXT) if chunk.startswith("\n") else 0
        encoding = tokenizer.encode(_CONTEXT[:begin] + chunk)
        skip = len(tokenizer.encode(_CONTEXT[:begin]).ids)
        ids += encoding.ids[skip:]
        ends = [min(max(end - begin, 0), len(chunk)) for _, end in encoding.offsets[skip:]]
        if ends:
            ends[-1] = len(chunk)  # includes white space at the end that has no token
        offsets = np.maximum.accumulate(np.array([0, *ends]))
        words_before = np.concatenate(([0], np.cumsum(word_starts(chunk))))  # words that begin before each character
        characters.append(np.diff(offsets))
        words.append(np.diff(words_before[offsets]))
    one = np.ones(1, np.int64)
    return CountedText(
        np.array([*ids, EOS], np.int64), np.concatenate([*words, one]), np.concatenate([*characters, one])
    )


def word_starts(text: str) -> list[bool]:
    """For each character, whether a word begins with it; a chunk begins after white space, or at the start."""
    space = [True, *(character.isspace() for character in text)]
    return [before and not now for before, now in pairwise(space)]
