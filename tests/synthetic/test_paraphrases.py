"""Paraphrases: determinism, distinct meanings, disjoint content words, near neighbours."""

from __future__ import annotations

from itertools import combinations

import pytest

from transduce.errors import InputError
from transduce.synthetic.sentences import TOPICS, generate_paraphrases

FUNCTION_WORDS = {
    "a",
    "an",
    "as",
    "at",
    "before",
    "by",
    "in",
    "is",
    "it",
    "my",
    "of",
    "on",
    "one",
    "our",
    "out",
    "some",
    "the",
    "to",
}


def test_equal_seeds_give_equal_pairs():
    assert list(generate_paraphrases(20, seed=4)) == list(generate_paraphrases(20, seed=4))
    assert list(generate_paraphrases(20, seed=4)) != list(generate_paraphrases(20, seed=5))


def test_paraphrases_share_no_content_word():
    for one in generate_paraphrases(1000):
        assert not (set(one.source.split()) & set((one.target or "").split())) - FUNCTION_WORDS, one


def test_every_meaning_has_synonyms_and_no_expression_has_two_meanings():
    for topic in TOPICS.values():
        for slot in topic.slots:
            expressions = [expression for synonyms in slot for expression in synonyms]
            assert all(len(synonyms) >= 2 for synonyms in slot)
            assert len(set(expressions)) == len(expressions)


def test_many_sentences_have_near_neighbours_with_another_meaning():
    """Sentences that share all but a few words with a sentence of another meaning."""
    words = [set(one.source.split()) for one in generate_paraphrases(300)]
    near = {row for (row, a), (_, b) in combinations(enumerate(words), 2) if len(a ^ b) <= 8}
    assert len(near) >= 100


def test_requesting_more_meanings_than_exist_is_an_error():
    with pytest.raises(InputError, match="distinct meanings"):
        generate_paraphrases(100_000)
    assert {one.extra["topic"] for one in generate_paraphrases(200)} == set(TOPICS)
