"""Vocabularies of the tokenizer kinds: training, BPE dropout, storage; bounds of the tokenizers library.

chars    one piece per character                      words    one piece per word (spaces: see below)
    bytes    one piece per byte of UTF-8                  bpe, unigram    learnt pieces over bytes, inside words
    labels   one piece per line                           given    pieces of an imported tokenizer

After the characters of `chars` may come tags: morphological features, `;` before each, which no text is encoded to.

`bpe` and `unigram` work on bytes, so they can represent any text. They read every text with one space prepended, so
that a word is the same piece at the start of a line and within it; `Tokenizer.decode` removes that space again.

`words`: exactly one plain space between two words is implicit; all other white space is a piece of its own.

A tokenizer of another model may come from anywhere. Its steps may make a text longer: forty steps that each double it
make a terabyte of one letter. So growth is bounded before the first text is read. The library panics, which no `except
Exception` catches, where a regular expression takes too long and where a table is damaged.
"""

from __future__ import annotations

import base64
import heapq
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeVar

from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from transduce.data.languages import NAME
from transduce.data.tokenizers.normalisation import STEPS
from transduce.errors import InputError
from transduce.flow import SPECIALS, UNK

MAX_GROWTH = 1024  # characters of a text after all steps, for each that it had
MAX_STEPS = 100
MAX_PIECE = 4096  # characters
MAX_ID = 2**22
BYTES_PER_CHARACTER = 4  # of UTF-8
STEP_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
ZERO_WIDTH = re.compile(r"\(\?<?[=!]|\\[bBAzZGKyY]|[\^$]")  # assertions, which match between two characters
MARK, LETTER = "\ue000", "\ue001"  # for private use: no expression asks for them
Result = TypeVar("Result")
FORMAT = 2  # of the tokenizer file
KINDS = ("chars", "words", "bytes", "bpe", "unigram", "labels")  # kinds that can be trained
GIVEN = "given"
# White space according to str.isspace() and str.split(). \s of the tokenizers library is a smaller set.
SPACE = "[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LETTER = SPACE.replace("[", "[^")
_EXPLICIT_SPACE = re.compile(
    rf"(?!(?<={_LETTER}) (?={_LETTER})){SPACE}"
)  # white space that is a piece of its own in `words`
_IMPLICIT_SPACE = rf"(?<={_LETTER}) (?={_LETTER})"
# Words with their marks (an Indic vowel sign is a mark, not a letter), numbers, the rest; each with a space before it.
_PARTS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
_TAG_SEPARATORS = re.compile(r"[;|\s]+")
TAG_MARK = ";"  # before a tag in the vocabulary: a piece of several characters is a tag
_FLOOR_STEP = 0.0001  # score difference of unseen characters, whose order differs from run to run


def open_backend(text: str) -> Backend:
    """A tokenizer from its JSON; a ValueError says what is wrong with it."""
    if "Precompiled" in text or "\\u" in text:  # an escape may stand for a letter of it
        for step in _precompiled(json.loads(text)):
            check_charsmap(base64.b64decode(step))
    try:
        backend = run_library(Backend.from_str, text)
        for growth in _growth(backend):
            if growth > MAX_GROWTH:
                raise ValueError(f"its steps make a text up to {growth:,.0f} times as long; at most {MAX_GROWTH:,}")
    except InputError as error:
        raise ValueError(error.problem) from None
    pieces = backend.get_vocab(with_added_tokens=True)
    longest, largest = max(map(len, pieces), default=0), max(pieces.values(), default=0)
    if longest > MAX_PIECE:
        raise ValueError(f"a piece has {longest:,} characters; at most {MAX_PIECE:,}")
    if largest > MAX_ID:  # the library allocates memory for every id up to the last
        raise ValueError(f"a piece has the id {largest:,}; at most {MAX_ID:,}")
    return backend


def run_library(call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Calls the library; its panics and its bare exceptions become an InputError."""
    try:
        return call(*arguments, **options)
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        slow = "retry-limit" in reason
        problem = "a regular expression of this tokenizer takes too long" if slow else f"the tokenizer failed: {reason}"
        raise InputError(problem[:300], remedy="use a model with another tokenizer, or another text") from None


def _growth(backend: Backend) -> Iterator[float]:
    """How many times as long a text may become: as it is read, as it is written, and within the template."""
    read = [_steps(part) for part in (backend.normalizer, backend.pre_tokenizer)]
    written, around = _steps(backend.decoder), _steps(backend.post_processor)
    if sum(map(len, (*read, written, around))) > MAX_STEPS:
        raise ValueError(f"more than {MAX_STEPS} steps")
    yield prod(_factor(step, reads=True) for steps in read for step in steps)
    yield prod(_factor(step, reads=False) for step in written)
    yield prod(_copies(step) for step in around)


def _steps(part: Any) -> list[Mapping[str, Any]]:
    """The steps of a part of a tokenizer, from the JSON that the library itself writes."""
    if part is None:
        return []

    def flatten(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        inner = next((step[name] for name in STEP_LISTS if name in step), None)
        if inner is None:
            yield step
        for one in inner or ():
            yield from flatten(one)

    return list(flatten(json.loads(run_library(part.__getstate__))))


def _factor(step: Mapping[str, Any], *, reads: bool) -> float:
    """The growth of a text through one step. Steps of a fixed table, such as NFKC, do not grow a text twice."""
    kind = step.get("type")
    if kind == "Replace":
        return _replacement(step["pattern"], step["content"])
    if kind == "ByteLevel":
        return BYTES_PER_CHARACTER if reads else 1
    if kind == "Precompiled":
        return _longest_entry(step["precompiled_charsmap"])
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Metaspace":
        return 2 if reads else 1
    if kind in ("BPEDecoder", "CTC"):
        empty = step.get("suffix", step.get("word_delimiter_token")) == ""  # found between any two characters
        return 3 if empty else 1
    return 1


def _replacement(pattern: Mapping[str, str], content: str) -> float:
    text, expression = pattern.get("String"), pattern.get("Regex", "")
    if text:
        return max(1.0, len(content) / len(text))
    from tokenizers import Regex, normalizers

    matches_nothing = bool(ZERO_WIDTH.search(expression)) or text is not None
    if not matches_nothing:  # an empty match, beside the letter or after it
        replaced = run_library(normalizers.Replace(Regex(expression), MARK).normalize_str, LETTER)
        matches_nothing = replaced.count(MARK) > (LETTER not in replaced)
    return max(1.0, len(content) + matches_nothing)


def _longest_entry(charsmap: str) -> int:
    """The longest replacement in a SentencePiece table: a trie with its size before it, then texts that end in NUL."""
    blob = base64.b64decode(charsmap)
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    return max((len(one) for one in texts.split(b"\0")), default=1) or 1


def check_charsmap(table: bytes) -> None:
    """Raises a ValueError if a SentencePiece table is shorter than it says: the library allocates what it says."""
    if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
        raise ValueError("the table of its character normalisation is truncated")


def _precompiled(content: Any, depth: int = 0) -> Iterator[str]:
    """The tables of all normalisation steps in the JSON of a tokenizer."""
    if depth > MAX_STEPS:
        raise ValueError("too many nested steps")
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    if isinstance(content, dict) and content.get("type") == "Precompiled":
        yield str(content.get("precompiled_charsmap", ""))
    for one in inner:
        if isinstance(one, (dict, list)):
            yield from _precompiled(one, depth + 1)


def _copies(step: Mapping[str, Any]) -> int:
    """How often a template repeats the text."""
    single = step.get("single")
    return max(1, sum("Sequence" in piece for piece in single)) if isinstance(single, list) else 1


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a tokenizer, and everything else that is saved of it.

    The first four pieces are the special tokens; in `words` the out-of-vocabulary placeholders follow them.
    """

    kind: str
    pieces: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] = ()  # bpe, in the order in which they were learnt
    scores: tuple[float, ...] = ()  # unigram: log-probability of every piece
    oov_placeholders: int = 0  # pieces <unk1> .. <unkN>: see tokenizer.py
    backend_json: str = ""  # given: the tokenizer in the format of the tokenizers library, with its own ids
    backend_ids: tuple[int, ...] = ()  # given: the library's id of every piece, -1 where it has none
    prefix: tuple[int, ...] = ()  # ids at the beginning of every text
    suffix: tuple[int, ...] = ()  # given: ids at the end of every source
    normalisation: tuple[str, ...] = ()  # steps before tokenisation: see normalisation.py
    word_marks: bool = False  # given: see `Tokenizer.with_word_marks`
    languages: tuple[str, ...] = ()  # each has a tag, whose id follows those of the pieces: see data/languages.py

    @property
    def reserved(self) -> int:
        """The number of pieces that no text contains: the special tokens and the placeholders."""
        return len(SPECIALS) + self.oov_placeholders


def byte_letters() -> list[str]:
    """The printable character for each byte in the byte-level pieces of the tokenizers library."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def split_tags(text: str) -> list[str]:
    """The tags of `V;IND;3;SG`: separated by semicolons, vertical bars or spaces."""
    return [tag for tag in _TAG_SEPARATORS.split(text) if tag]


def train(texts: Iterable[str], kind: str, size: int, min_count: int = 1, oov_placeholders: int = 0) -> Vocabulary:
    """A vocabulary of at most `size` pieces, or of the minimum of the kind where that is more.

    The out-of-vocabulary placeholders, which `words` may have, are not included in `size`.
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


def _most_common(counts: Counter[str], size: int, min_count: int) -> list[str]:
    frequent = [piece for piece, count in counts.items() if count >= min_count]
    return sorted(frequent, key=lambda piece: (-counts[piece], piece))[: max(size, 0)]


def _train_words(texts: Iterable[str], size: int, min_count: int, oov_placeholders: int) -> Vocabulary:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
        counts.update(_EXPLICIT_SPACE.findall(text))
    always = [" ", "\t"]  # a double space must be representable even if it never occurs in training
    for piece in always:
        counts.pop(piece, None)
    numbers = [f"<unk{number}>" for number in range(1, oov_placeholders + 1)]
    pieces = (*SPECIALS, *numbers, *always, *_most_common(counts, size - len(SPECIALS) - 2, min_count))
    return Vocabulary("words", pieces, oov_placeholders=oov_placeholders)


def _train_bpe(texts: Iterable[str], size: int, min_count: int) -> Vocabulary:
    backend = _with_parts(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=max(size - len(SPECIALS), 256),
        min_frequency=max(min_count, 2),  # a pair that occurs once is not worth a merge
        initial_alphabet=byte_letters(),
        special_tokens=[],  # they would be matched in text, and merges could produce them
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
    backend.train_from_iterator(_non_empty(texts), trainer)
    learnt = dict(json.loads(backend.to_str())["model"]["vocab"])
    # The last bits of the scores and the order of unseen bytes differ from run to run: both are made deterministic.
    floor = min(learnt.values())
    scores = {
        piece: round(floor if len(piece) == 1 and score < floor + 257 * _FLOOR_STEP else score, 6)
        for piece, score in learnt.items()
    }
    ranked = sorted(scores, key=lambda piece: (-scores[piece], piece))
    return Vocabulary("unigram", (*SPECIALS, *ranked), scores=(0.0,) * 4 + tuple(scores[piece] for piece in ranked))


def _non_empty(texts: Iterable[str]) -> Iterator[str]:
    """The texts and one more that is not empty: the library's trainer fails without any text."""
    yield from texts
    yield " "


def backend(vocabulary: Vocabulary) -> Backend:
    """The encoder of the tokenizers library. Special tokens get names that no text contains: a space inside a longer
    piece, and for labels, which may have any spaces, a NUL, which data files must not contain."""
    kind, reserved = vocabulary.kind, vocabulary.reserved
    if kind == GIVEN:
        return open_backend(vocabulary.backend_json)
    names = [f"{name}\0" if kind == "labels" else f"{name} " for name in vocabulary.pieces[:reserved]]
    names += vocabulary.pieces[reserved:]
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
    words = [pre_tokenizers.Split(Regex(_IMPLICIT_SPACE), "removed"), pre_tokenizers.Split(Regex(SPACE), "isolated")]
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
    """The content of the tokenizer file. It is deterministic: the fingerprint is computed from it."""
    content = asdict(vocabulary)
    optional = ("oov_placeholders", "backend_json", "backend_ids", "prefix", "suffix", "normalisation")
    for name in (*optional, "word_marks", "languages"):
        if not content[name]:
            del content[name]
    return json.dumps({"format": FORMAT, **content}, ensure_ascii=False, indent=0)


def from_json(text: str) -> Vocabulary:
    """A vocabulary from the content of its file; a ValueError says what is wrong with it."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"expected a JSON object with format {FORMAT}")
    vocabulary = Vocabulary(
        content["kind"],
        tuple(content["pieces"]),
        tuple((left, right) for left, right in content["merges"]),
        tuple(float(score) for score in content["scores"]),
        content.get("oov_placeholders", 0),
        str(content.get("backend_json", "")),
        tuple(content.get("backend_ids", ())),
        tuple(content.get("prefix", ())),
        tuple(content.get("suffix", ())),
        tuple(content.get("normalisation", ())),
        bool(content.get("word_marks", False)),
        tuple(content.get("languages", ())),
    )
    _check(vocabulary)
    return vocabulary


def _check(vocabulary: Vocabulary) -> None:
    kind, pieces, placeholders = vocabulary.kind, vocabulary.pieces, vocabulary.oov_placeholders
    if kind not in (*KINDS, GIVEN):
        raise ValueError(f"unknown kind {kind!r}")
    if pieces[: len(SPECIALS)] != SPECIALS or not all(isinstance(piece, str) and piece for piece in pieces):
        raise ValueError(f"the pieces must begin with {' '.join(SPECIALS)}")
    if not isinstance(placeholders, int) or not 0 <= placeholders <= len(pieces) - len(SPECIALS):
        raise ValueError("more out-of-vocabulary placeholders than pieces")
    if unknown := [step for step in vocabulary.normalisation if step not in STEPS]:
        raise ValueError(f"unknown normalisation {unknown[0]!r}")
    if not all(isinstance(name, str) and NAME.fullmatch(name) for name in vocabulary.languages):
        raise ValueError("an invalid name of a language")
    reserved = vocabulary.reserved
    if len(set(pieces[reserved:])) != len(pieces) - reserved:
        raise ValueError("a duplicate piece")
    if kind in ("bytes", "bpe", "unigram") and not set(byte_letters()) <= set(pieces):
        raise ValueError("not every byte has a piece")
    if len(vocabulary.scores) != (len(pieces) if kind == "unigram" else 0):
        raise ValueError("the number of scores does not match the pieces")
    if kind == GIVEN:
        ids = vocabulary.backend_ids
        if not vocabulary.backend_json:
            raise ValueError("the tokenizer of the library is missing")
        if len(ids) != len(pieces) or not all(isinstance(number, int) for number in ids):
            raise ValueError("the ids of the library do not match the pieces")
        around = (*vocabulary.prefix, *vocabulary.suffix)
        if not all(isinstance(number, int) and 0 <= number < len(pieces) for number in around):
            raise ValueError("prefix or suffix with an unknown piece")


class BPEDropout:
    """Segmentation by the merges of a BPE vocabulary, each skipped with some probability (Provilkov et al. 2020)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = enumerate(vocabulary.pieces)
        self._id_of = {piece: number for number, piece in pieces if number >= len(SPECIALS)}
        ids, merges = self._id_of, enumerate(vocabulary.merges)
        # Pair of ids -> (rank of the merge, id of the result).
        self._ranks = {(ids[left], ids[right]): (rank, ids[left + right]) for rank, (left, right) in merges}

    def __call__(self, word: str, rate: float, rng: random.Random) -> list[int]:
        tokens: list[int | None] = [self._id_of[letter] for letter in word]
        following = [*range(1, len(tokens)), -1]
        preceding = list(range(-1, len(tokens) - 1))
        queue: list[tuple[int, int, int, int]] = []  # rank, position, the pair: the best and leftmost merge first

        def push(position: int) -> None:
            if position >= 0 and following[position] >= 0:
                pair = (tokens[position], tokens[following[position]])
                if pair in self._ranks:
                    heapq.heappush(queue, (self._ranks[pair][0], position, *pair))

        for position in range(len(tokens)):
            push(position)
        skipped: list[tuple[int, int, int, int]] = []
        while queue:
            entry = heapq.heappop(queue)
            _, position, left, right = entry
            after = following[position]
            if tokens[position] != left or after < 0 or tokens[after] != right:
                continue  # a neighbour was merged meanwhile
            if rate and rng.random() < rate:
                skipped.append(entry)
                continue
            tokens[position], tokens[after] = self._ranks[left, right][1], None
            following[position] = following[after]
            if following[position] >= 0:
                preceding[following[position]] = position
            for merge in skipped:  # a skipped merge may still be applied after another one
                heapq.heappush(queue, merge)
            skipped.clear()
            push(position)
            push(preceding[position])
        return [token for token in tokens if token is not None]
