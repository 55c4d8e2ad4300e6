"""Generated tasks: the target is the right answer, the alignment is the right one, and nothing leaks between splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.flow import Example
from transduce.synthetic import algorithmic as synthetic

# Written without looking at the tasks' own definition.
ANSWERS = {
    "copy": lambda words: words,
    "reverse": lambda words: words[::-1],
    "sort": lambda words: sorted(words),
}

tasks = st.sampled_from(sorted(synthetic.TASKS))


def test_every_task_has_an_oracle() -> None:
    assert set(ANSWERS) == set(synthetic.TASKS)


@given(task=tasks, seed=st.integers(), low=st.integers(1, 6), more=st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_targets_are_right_and_lengths_are_kept(task: str, seed: int, low: int, more: int) -> None:
    examples = list(synthetic.generate(task, 10, seed, length=(low, low + more)))
    assert len(examples) == 10
    for example in examples:
        words = example.source.split(" ")
        assert example.target is not None
        assert low <= len(words) <= low + more
        assert example.target.split(" ") == ANSWERS[task](words)


@given(task=tasks, words=st.lists(st.sampled_from(["ba", "du", "ko"]), min_size=1, max_size=9))
def test_alignment_is_one_to_one_and_links_equal_words(task: str, words: list[str]) -> None:
    target = ANSWERS[task](words)
    links = synthetic.gold_alignment(task, Example(" ".join(words), " ".join(target)))
    assert {source for source, _ in links} == {place for _, place in links} == set(range(len(words)))
    assert len(links) == len(words)
    assert all(words[source] == target[place] for source, place in links)


def test_alignment_by_hand() -> None:
    example = Example("c a b")
    assert synthetic.gold_alignment("copy", example) == {(0, 0), (1, 1), (2, 2)}
    assert synthetic.gold_alignment("reverse", example) == {(2, 0), (1, 1), (0, 2)}
    assert synthetic.gold_alignment("sort", example) == {(1, 0), (2, 1), (0, 2)}


@given(task=tasks, seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_no_source_occurs_twice_in_a_split(task: str, seed: int) -> None:
    # 62 sequences there are, 31 are asked for: sources run out unless they are drawn without repetition.
    parts = synthetic.split(task, 20, 6, 5, seed, length=(1, 5), symbols=("a", "b"))
    assert [len(part) for part in parts] == [20, 6, 5]
    assert len({example.source for part in parts for example in part}) == 31


def test_every_length_is_in_every_part() -> None:
    parts = synthetic.split("copy", 2000, 400, 400, length=(2, 4), symbols=synthetic.LETTERS)
    for part in parts:
        assert {len(example.source.split()) for example in part} == {2, 3, 4}


def test_same_seed_same_examples() -> None:
    first, again = (list(synthetic.generate("sort", 50, 3)) for _ in range(2))
    assert first == again
    assert first != list(synthetic.generate("sort", 50, 4))
    assert list(synthetic.generate("sort", 20, 3)) == first[:20]
    assert synthetic.split("copy", 9, 3, 3, 5) == synthetic.split("copy", 9, 3, 3, 5)


@given(count=st.integers(1, 300), seed=st.integers())
@settings(max_examples=20, deadline=None)
def test_invented_words_are_different_words(count: int, seed: int) -> None:
    words = synthetic.invent_words(count, seed)
    assert len(set(words)) == count
    assert all(word.isalpha() for word in words)
    example = next(synthetic.generate("copy", 1, seed, symbols=words))
    assert set(example.source.split()) <= set(words)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="reverse"):
        synthetic.generate("revrese", 1)
    with pytest.raises(InputError, match="not a range"):
        synthetic.generate("copy", 1, length=(3, 2))
    with pytest.raises(InputError, match="without spaces"):
        synthetic.generate("copy", 1, symbols=("a", "b c"))
    with pytest.raises(InputError, match="only 6"):
        synthetic.split("copy", 2, 1, 1, length=(1, 2), symbols=("a", "b"))
