"""Terminology: required and banned phrases of each line, glossaries, and input lines in JSON that carry them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from transduce.data.readers.corpus import numbered_texts
from transduce.data.readers.files import stored_lines
from transduce.data.tokenizers.tokenizer import Tokenizer, encode_targets
from transduce.decoding.continuous_batching import SearchRequest
from transduce.errors import InputError, nearest
from transduce.flow import UNK, LexicalConstraints
from transduce.parsing import parse_json
from transduce.recipe import GenerationRecipe

Phrase = str | tuple[str, ...]  # a text, or alternatives of which one suffices


@dataclass(frozen=True)
class Constraints:
    """Phrases that one output must contain, and phrases that it must not. One of several alternatives suffices."""

    required: tuple[Phrase, ...] = ()
    banned: tuple[str, ...] = ()

    def __add__(self, other: Constraints) -> Constraints:
        return Constraints(self.required + other.required, self.banned + other.banned)

    @property
    def alternatives(self) -> list[tuple[str, ...]]:
        return [(phrase,) if isinstance(phrase, str) else tuple(phrase) for phrase in self.required]


@dataclass(frozen=True)
class PhraseIds:
    """The constraints of one line as ids."""

    required: list[list[list[int]]]
    banned: list[list[int]]

    def __bool__(self) -> bool:
        return bool(self.required or self.banned)

    @property
    def length(self) -> int:
        """Tokens that suffice for all required phrases."""
        return sum(min(map(len, alternatives)) for alternatives in self.required)


def check_constraints(
    constraints: Iterable[Constraints | None], texts: Sequence[str], *, drafted: bool, sourceless: bool
) -> list[Constraints | None]:
    """Constraints are for the search of a model with a source, one a line."""
    given = list(constraints)
    if len(given) != len(texts):
        raise InputError(f"{len(texts)} lines but constraints for {len(given)}", remedy="give one per line, or None")
    if drafted:
        raise InputError("speculative decoding does not support constraints", remedy="leave out one of them")
    if sourceless:
        raise InputError("constraints are for models that read a source", remedy="leave the constraints out")
    return given


def encode_constraints(
    tokenizer: Tokenizer, constraints: Iterable[Constraints | None], texts: Sequence[str]
) -> list[PhraseIds]:
    """The constraints of each line as ids; phrases that the vocabulary cannot write are refused."""
    return [_encode(tokenizer, one or Constraints(), text) for one, text in zip(constraints, texts, strict=True)]


def _encode(tokenizer: Tokenizer, constraints: Constraints, source: str) -> PhraseIds:
    required = [[_ids(tokenizer, text, source) for text in phrase] for phrase in constraints.alternatives]
    banned = [ids for text in constraints.banned for ids in tokenizer.segmentations(_checked(text)) if UNK not in ids]
    for phrase, alternatives in zip(constraints.required, required, strict=True):
        if all(any(_occurs(one, ids) for one in banned) for ids in alternatives):
            raise InputError(f"{phrase!r} is required, but it contains a banned phrase", remedy="leave out one of them")
    allowed = [[ids for ids in phrase if not any(_occurs(one, ids) for one in banned)] for phrase in required]
    return PhraseIds(allowed, banned)


def _ids(tokenizer: Tokenizer, text: str, source: str) -> list[int]:
    ids = encode_targets(tokenizer, [_checked(text)], [source])[0][len(tokenizer.prefix) :]
    if UNK in ids:
        raise InputError(
            f"the target vocabulary cannot write {text!r}",
            where="constraints",
            remedy="require words of the training data, or train with `tokens.target.kind: bpe`, which writes any text",
        )
    return ids


def _checked(text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{text!r} is not a phrase", where="constraints", remedy="give words")
    return text.strip()


def _occurs(phrase: list[int], ids: list[int]) -> bool:
    return any(ids[start : start + len(phrase)] == phrase for start in range(len(ids)))


def constrained_request(
    request: SearchRequest, phrases: Sequence[PhraseIds], settings: GenerationRecipe, most: int
) -> SearchRequest:
    """The request with these constraints; outputs may become as long as they need, up to `most` tokens."""
    prefix_length = 0 if request.prefix is None else request.prefix.values.size(1)
    needed = torch.tensor([prefix_length + (settings.forced_bos is not None) + one.length + 1 for one in phrases])
    if int(needed.max()) > most:
        raise InputError(
            f"the required phrases of a line have {int(needed.max()) - 1:,} tokens, and outputs at most {most:,}",
            where="constraints",
            remedy="require fewer phrases",
        )
    constraints = LexicalConstraints.from_rows([one.required for one in phrases], [one.banned for one in phrases])
    return replace(request, max_lengths=torch.maximum(request.max_lengths, needed), constraints=constraints)


class Glossary:
    """Terms of the source language with their translations: where a source contains a term, a translation is required.

    Terms are found as whole words, long ones first; text that belongs to one term belongs to no other.
    """

    def __init__(self, terms: dict[str, tuple[str, ...]]) -> None:
        self.terms = terms

    @classmethod
    def load(cls, path: str | Path) -> Glossary:
        """A file with `term TAB translation` in each line; further columns are alternatives. # begins a comment."""
        terms: dict[str, tuple[str, ...]] = {}
        for number, line in enumerate(_lines(path), 1):
            if not line.strip() or line.startswith("#"):
                continue
            term, *translations = (part.strip() for part in line.split("\t"))
            if not term or not translations or not all(translations):
                raise InputError(
                    f"{line!r} is not a term and its translation",
                    where=f"{path}:{number}",
                    remedy="write `term TAB translation`, and alternatives in further columns",
                )
            terms[term] = (*terms.get(term, ()), *translations)
        return cls(terms)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        terms = sorted(self.terms, key=len, reverse=True)
        return re.compile("|".join(map(_whole_words, terms)) if terms else r"(?!)")

    def constraints(self, source: str) -> Constraints:
        """The translations that the output for this source must contain, once for each term."""
        found = dict.fromkeys(match.group() for match in self._pattern.finditer(source))
        return Constraints(tuple(self.terms[term] for term in found))


# Scripts without spaces between words: Thai, Lao, Khmer, Myanmar, kana, Chinese characters.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def _whole_words(term: str) -> str:
    """A pattern of the term that neither begins nor ends inside a word."""

    def edge(character: str, outside: str) -> str:
        return outside if re.match(r"\w", character) and not UNSPACED.match(character) else ""

    return edge(term[0], r"(?<!\w)") + re.escape(term) + edge(term[-1], r"(?!\w)")


def read_phrases(path: str | Path) -> tuple[str, ...]:
    """The phrases of a file, one a line."""
    return tuple(line.strip() for line in _lines(path) if line.strip())


def _lines(path: str | Path) -> Iterator[str]:
    return numbered_texts(stored_lines(str(path)), str(path))


KEYS = ("text", "constraints", "avoid", "prefix")


@dataclass(frozen=True)
class ConstrainedLine:
    """An input line with its constraints, and the text that its output begins with."""

    text: str
    constraints: Constraints = Constraints()
    prefix: str = ""

    @classmethod
    def parse(cls, line: str, where: str) -> ConstrainedLine:
        """`{"text": ..., "constraints": ["phrase", ["one", "or another"]], "avoid": ["phrase"], "prefix": ...}`"""
        remedy = 'write {"text": "...", "constraints": ["..."], "avoid": ["..."], "prefix": "..."}'
        content = parse_json(line, where, remedy=remedy)
        if not isinstance(content, dict) or not isinstance(content.get("text"), str):
            raise InputError("no text in this line", where=where, remedy=remedy)
        if unknown := [key for key in content if key not in KEYS]:
            raise InputError(f"unknown key {unknown[0]!r}", where=where, remedy=nearest(unknown[0], KEYS))
        required = tuple(_phrase(one, where, remedy) for one in _list(content, "constraints", where, remedy))
        avoided = tuple(str(_phrase(one, where, remedy)) for one in _list(content, "avoid", where, remedy))
        return cls(content["text"], Constraints(required, avoided), str(content.get("prefix", "")))


def _list(content: dict[str, Any], key: str, where: str, remedy: str) -> list[Any]:
    found = content.get(key, [])
    if not isinstance(found, list):
        raise InputError(f"{key} is not a list", where=where, remedy=remedy)
    return found


def _phrase(value: Any, where: str, remedy: str) -> Phrase:
    if isinstance(value, list) and value and all(isinstance(one, str) and one.strip() for one in value):
        return tuple(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{value!r} is not a phrase", where=where, remedy=remedy)
    return value
