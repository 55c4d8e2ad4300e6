"""Tokenizers of the Hugging Face tokenizers library: bounds on the growth of a text, and panics as errors.

A tokenizer of another model may come from anywhere. Its steps may make a text longer: forty steps that each double it
make a terabyte of one letter. So growth is bounded before the first text is read. The library panics, which no `except
Exception` catches, where a regular expression takes too long and where a table is damaged.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, TypeVar

from tokenizers import Tokenizer as Backend

from transduce.errors import InputError

MAX_GROWTH = 1024  # characters of a text after all steps, for each that it had
MAX_STEPS = 100
MAX_PIECE = 4096  # characters
MAX_ID = 2**22
BYTES_PER_CHARACTER = 4  # of UTF-8
STEP_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
ZERO_WIDTH = re.compile(r"\(\?<?[=!]|\\[bBAzZGKyY]|[\^$]")  # assertions, which match between two characters
MARK, LETTER = "\ue000", "\ue001"  # for private use: no expression asks for them
Result = TypeVar("Result")


def open_backend(text: str) -> Backend:
    """A tokenizer from its JSON; a ValueError says what is wrong with it."""
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


def _copies(step: Mapping[str, Any]) -> int:
    """How often a template repeats the text."""
    single = step.get("single")
    return max(1, sum("Sequence" in piece for piece in single)) if isinstance(single, list) else 1
