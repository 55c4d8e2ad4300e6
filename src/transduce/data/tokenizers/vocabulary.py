"""Texts enter, a `Vocabulary` leaves: the pieces one kind of tokenisation knows, and the library's encoder for them.

    chars    one piece a character                        words    one piece a word (spaces: see below)
    bytes    one piece a byte of UTF-8                    bpe, unigram    learnt pieces over bytes, inside words
    labels   one piece a line                             given    pieces of a tokenizer made elsewhere

`bpe` and `unigram` work on bytes, so there is no text they cannot spell. They read every text with one space put in
front, so that a word is the same piece at the start of a line and within it; `Tokenizer.decode` takes it off again.

`words`: exactly one plain space between two words is left unsaid; every other white space is a piece of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from transduce.flow import SPECIALS, UNK

FORMAT = 1  # of the file
KINDS = ("chars", "words", "bytes", "bpe", "unigram", "labels")  # that can be trained
GIVEN = "given"

# What str.isspace() and str.split() call white space. The library's own \s is a smaller set.
SPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LETTER = SPACE.replace("[", "[^")
_SAID = re.compile(rf"(?!(?<={_LETTER}) (?={_LETTER})){SPACE}")  # white space that is a piece of its own in `words`
_UNSAID = rf"(?<={_LETTER}) (?={_LETTER})"

# Words with their marks (an Indic vowel sign is a mark, not a letter), numbers, the rest; each with one space before.
_PARTS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"

_FLOOR_STEP = 0.0001  # the library ranks unseen characters by this, in an order that differs from run to run


@dataclass(frozen=True)
class Vocabulary:
    """What training leaves behind, and all that is saved. The first four pieces are the special ones; after them
    come, in `words`, the requested number of out-of-vocabulary placeholders."""

    kind: str
    pieces: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] = ()  # bpe, the first learnt first
    scores: tuple[float, ...] = ()  # unigram: log-probability of every piece
    oov_placeholders: int = 0  # pieces <unk1> .. <unkN>: see unknowns.py
    library: str = ""  # given: the tokenizer as the library writes it, with numbers of its own
    rows: tuple[int, ...] = ()  # given: the library's number of every piece, -1 where it has none
    lead: tuple[int, ...] = ()  # given: pieces that every text begins with
    tail: tuple[int, ...] = ()  # given: pieces that every source ends with

    @property
    def unspoken(self) -> int:
        """How many pieces no text can spell: the special ones and the placeholders."""
        return len(SPECIALS) + self.oov_placeholders


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in the library's byte-level pieces, by byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def train(texts: Iterable[str], kind: str, size: int, min_count: int = 1, oov_placeholders: int = 0) -> Vocabulary:
    """A vocabulary of at most `size` pieces, or of the fewest that the kind needs where that is more.

    Numbered unknowns, which `words` may have, come on top.
    """
    if kind == "chars":
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        return Vocabulary(kind, (*SPECIALS, *_most_common(counts, size - len(SPECIALS), min_count)))
    if kind == "labels":
        return Vocabulary(kind, (*SPECIALS, *_most_common(Counter(texts), size - len(SPECIALS), min_count)))
    if kind == "words":
        return _train_words(texts, size, min_count, oov_placeholders)
    if kind == "bytes":
        return Vocabulary(kind, (*SPECIALS, *byte_letters()))
    return _train_bpe(texts, size, min_count) if kind == "bpe" else _train_unigram(texts, size)


def _most_common(counts: Counter[str], most: int, min_count: int) -> list[str]:
    frequent = [piece for piece, count in counts.items() if count >= min_count]
    return sorted(frequent, key=lambda piece: (-counts[piece], piece))[: max(most, 0)]


def _train_words(texts: Iterable[str], size: int, min_count: int, oov_placeholders: int) -> Vocabulary:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
        counts.update(_SAID.findall(text))
    always = [" ", "\t"]  # a doubled space must survive even where training saw none
    for piece in always:
        counts.pop(piece, None)
    numbers = [f"<unk{number}>" for number in range(1, oov_placeholders + 1)]
    pieces = (*SPECIALS, *numbers, *always, *_most_common(counts, size - len(SPECIALS) - 2, min_count))
    return Vocabulary("words", pieces, oov_placeholders=oov_placeholders)


def _train_bpe(texts: Iterable[str], size: int, min_count: int) -> Vocabulary:
    backend = _with_parts(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=max(size - len(SPECIALS), 256),
        min_frequency=max(min_count, 2),  # a pair seen once teaches nothing
        initial_alphabet=byte_letters(),
        special_tokens=[],  # they would be found in running text, and merges could lead to them
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    pieces = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(backend.to_str())["model"]["merges"]
    return Vocabulary("bpe", (*SPECIALS, *(piece for piece, _ in pieces)), tuple((a, b) for a, b in merges))


def _train_unigram(texts: Iterable[str], size: int) -> Vocabulary:
    backend = _with_parts(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=max(size - len(SPECIALS), 257),
        max_piece_length=32,  # in bytes
        initial_alphabet=byte_letters(),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(_or_a_space(texts), trainer)
    learnt = dict(json.loads(backend.to_str())["model"]["vocab"])
    # The last bits of the scores and the order of the unseen bytes differ from run to run: both are settled here.
    floor = min(learnt.values())
    scores = {
        piece: round(floor if len(piece) == 1 and score < floor + 257 * _FLOOR_STEP else score, 6)
        for piece, score in learnt.items()
    }
    ranked = sorted(scores, key=lambda piece: (-scores[piece], piece))
    return Vocabulary("unigram", (*SPECIALS, *ranked), scores=(0.0,) * 4 + tuple(scores[piece] for piece in ranked))


def _or_a_space(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with one more that is never empty: the library's trainer cannot start from nothing."""
    yield from texts
    yield " "


def backend(vocabulary: Vocabulary) -> Backend:
    """The library's encoder. Special pieces get names that no text can spell: a space inside a longer piece, and for
    labels, which may have any spaces, a NUL, which no file of pairs may hold."""
    kind, unspoken = vocabulary.kind, vocabulary.unspoken
    if kind == GIVEN:
        return Backend.from_str(vocabulary.library)
    names = [f"{name}\0" if kind == "labels" else f"{name} " for name in vocabulary.pieces[:unspoken]]
    names += vocabulary.pieces[unspoken:]
    ids = {name: number for number, name in enumerate(names)}
    if kind in ("bpe", "bytes"):
        model = models.BPE(vocab=ids, merges=list(vocabulary.merges))
        return _with_parts(model) if kind == "bpe" else _with_bytes(model)
    if kind == "unigram":
        return _with_parts(models.Unigram(list(zip(names, vocabulary.scores, strict=True)), UNK, False))
    result = Backend(models.WordLevel(ids, unk_token=names[UNK]))
    if kind == "labels":
        return result
    character = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    words = [pre_tokenizers.Split(Regex(_UNSAID), "removed"), pre_tokenizers.Split(Regex(SPACE), "isolated")]
    result.pre_tokenizer = character if kind == "chars" else pre_tokenizers.Sequence(words)
    return result


def _with_parts(model: models.Model) -> Backend:
    result = Backend(model)
    result.normalizer = normalizers.Prepend(" ")
    parts = pre_tokenizers.Split(Regex(_PARTS), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([parts, letters])
    return result


def _with_bytes(model: models.Model) -> Backend:
    result = Backend(model)
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return result


def to_json(vocabulary: Vocabulary) -> str:
    """The file of a vocabulary, of which its fingerprint is made too: the same vocabulary, the same letters."""
    content = asdict(vocabulary)
    for name in ("oov_placeholders", "library", "rows", "lead", "tail"):
        if not content[name]:  # a vocabulary without them is the file it was before they were thought of
            del content[name]
    return json.dumps({"format": FORMAT, **content}, ensure_ascii=False, indent=0)


def from_json(text: str) -> Vocabulary:
    """A vocabulary from what a file says, or a ValueError that says why not."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"expected a JSON object with format {FORMAT}")
    kind, pieces, oov_placeholders = content["kind"], tuple(content["pieces"]), content.get("oov_placeholders", 0)
    merges = tuple((left, right) for left, right in content["merges"])
    scores = tuple(float(score) for score in content["scores"])
    if kind not in (*KINDS, GIVEN):
        raise ValueError(f"unknown kind {kind!r}")
    if pieces[: len(SPECIALS)] != SPECIALS or not all(isinstance(piece, str) and piece for piece in pieces):
        raise ValueError(f"the pieces must begin with {' '.join(SPECIALS)}")
    if not isinstance(oov_placeholders, int) or not 0 <= oov_placeholders <= len(pieces) - len(SPECIALS):
        raise ValueError("more out-of-vocabulary placeholders than pieces")
    unspoken = len(SPECIALS) + oov_placeholders
    if len(set(pieces[unspoken:])) != len(pieces) - unspoken:
        raise ValueError("a piece stands there twice")
    if kind in ("bytes", "bpe", "unigram") and not set(byte_letters()) <= set(pieces):
        raise ValueError("not every byte has a piece")
    if len(scores) != (len(pieces) if kind == "unigram" else 0):
        raise ValueError("the scores do not fit the pieces")
    if kind == GIVEN:
        rows = tuple(content["rows"])
        lead, tail = tuple(content.get("lead", ())), tuple(content.get("tail", ()))
        if len(rows) != len(pieces) or not all(isinstance(row, int) for row in rows):
            raise ValueError("the numbers of the library do not fit the pieces")
        if not all(isinstance(number, int) and 0 <= number < len(pieces) for number in (*lead, *tail)):
            raise ValueError("a text cannot begin or end with a piece that is not there")
        return Vocabulary(kind, pieces, merges, scores, oov_placeholders, str(content["library"]), rows, lead, tail)
    return Vocabulary(kind, pieces, merges, scores, oov_placeholders)
