"""Algorithmic tasks: correct targets and alignments, disjoint splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic import algorithmic

# Independent of the definition in the module.
ANSWERS = {
    "copy": lambda words: words,
    "reverse": lambda words: words[::-1],
    "sort": lambda words: sorted(words),
}

tasks = st.sampled_from(sorted(algorithmic.TASKS))


def test_every_task_has_a_reference() -> None:
    assert set(ANSWERS) == set(algorithmic.TASKS)


@given(task=tasks, seed=st.integers(), low=st.integers(1, 6), more=st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_targets_are_correct_and_lengths_are_in_range(task: str, seed: int, low: int, more: int) -> None:
    examples = list(algorithmic.generate(task, 10, seed, length=(low, low + more)))
    assert len(examples) == 10
    for example in examples:
        words = example.source.split(" ")
        assert example.target is not None
        assert low <= len(words) <= low + more
        assert example.target.split(" ") == ANSWERS[task](words)


@given(task=tasks, words=st.lists(st.sampled_from(["ba", "du", "ko"]), min_size=1, max_size=9))
def test_alignment_is_one_to_one_and_links_equal_words(task: str, words: list[str]) -> None:
    target = ANSWERS[task](words)
    links = algorithmic.gold_alignment(task, Example(" ".join(words), " ".join(target)))
    assert {source for source, _ in links} == {place for _, place in links} == set(range(len(words)))
    assert len(links) == len(words)
    assert all(words[source] == target[place] for source, place in links)


def test_alignment_of_a_known_example() -> None:
    example = Example("c a b")
    assert algorithmic.gold_alignment("copy", example) == {(0, 0), (1, 1), (2, 2)}
    assert algorithmic.gold_alignment("reverse", example) == {(2, 0), (1, 1), (0, 2)}
    assert algorithmic.gold_alignment("sort", example) == {(1, 0), (2, 1), (0, 2)}


@given(task=tasks, seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_no_source_occurs_twice_in_a_split(task: str, seed: int) -> None:
    # 31 of the 62 possible sequences: too few remain unless sources are sampled without repetition.
    parts = algorithmic.split(task, 20, 6, 5, seed, length=(1, 5), symbols=("a", "b"))
    assert [len(part) for part in parts] == [20, 6, 5]
    assert len({example.source for part in parts for example in part}) == 31


def test_every_length_occurs_in_every_part() -> None:
    parts = algorithmic.split("copy", 2000, 400, 400, length=(2, 4), symbols=algorithmic.LETTERS)
    for part in parts:
        assert {len(example.source.split()) for example in part} == {2, 3, 4}


def test_equal_seeds_give_equal_examples() -> None:
    first, again = (list(algorithmic.generate("sort", 50, 3)) for _ in range(2))
    assert first == again
    assert first != list(algorithmic.generate("sort", 50, 4))
    assert list(algorithmic.generate("sort", 20, 3)) == first[:20]
    assert algorithmic.split("copy", 9, 3, 3, 5) == algorithmic.split("copy", 9, 3, 3, 5)


@given(count=st.integers(1, 300), seed=st.integers())
@settings(max_examples=20, deadline=None)
def test_invented_words_are_distinct(count: int, seed: int) -> None:
    words = algorithmic.invent_words(count, seed)
    assert len(set(words)) == count
    assert all(word.isalpha() for word in words)
    example = next(algorithmic.generate("copy", 1, seed, symbols=words))
    assert set(example.source.split()) <= set(words)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="reverse"):
        algorithmic.generate("revrese", 1)
    with pytest.raises(InputError, match="not a range"):
        algorithmic.generate("copy", 1, length=(3, 2))
    with pytest.raises(InputError, match="without spaces"):
        algorithmic.generate("copy", 1, symbols=("a", "b c"))
    with pytest.raises(InputError, match="only 6"):
        algorithmic.split("copy", 2, 1, 1, length=(1, 2), symbols=("a", "b"))
