"""Paraphrases: the same for the same seed, all meanings different, no content word on both sides, many near misses."""

from __future__ import annotations

from itertools import combinations

import pytest

from transduce.errors import InputError
from transduce.synthetic.paraphrases import TOPICS, generate

SMALL = {
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


def test_the_same_seed_gives_the_same_pairs():
    assert list(generate(20, seed=4)) == list(generate(20, seed=4))
    assert list(generate(20, seed=4)) != list(generate(20, seed=5))


def test_a_pair_shares_no_content_word():
    for one in generate(1000):
        assert not (set(one.source.split()) & set((one.target or "").split())) - SMALL, one


def test_every_thing_can_be_said_in_two_ways_and_no_two_things_in_the_same():
    for topic in TOPICS.values():
        for slot in topic.slots:
            ways = [way for thing in slot for way in thing]
            assert all(len(thing) >= 2 for thing in slot)
            assert len(set(ways)) == len(ways)


def test_near_misses_are_many():
    """Sentences that share all but a word or two with another one that means something else."""
    words = [set(one.source.split()) for one in generate(300)]
    near = {row for (row, a), (_, b) in combinations(enumerate(words), 2) if len(a ^ b) <= 8}
    assert len(near) >= 100


def test_meanings_run_out():
    with pytest.raises(InputError, match="different meanings"):
        generate(100_000)
    assert {one.extra["topic"] for one in generate(200)} == set(TOPICS)
