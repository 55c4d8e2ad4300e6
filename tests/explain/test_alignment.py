"""Attention maps between words, alignment links, symmetrisation, alignment error rate."""

from itertools import chain, combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.explain.alignment import alignment_error_rate, parse_pharaoh, pharaoh, symmetrise
from transduce.explain.attention import AttentionMap, combine_heads, links, to_words, visible

LINKS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


def random_map(seed: int, source: list[int], target: list[int]) -> AttentionMap:
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(source)), size=len(target))
    names = [[f"{side}{i}" for i in range(len(words))] for side, words in (("s", source), ("t", target))]
    return AttentionMap(weights, names[0], names[1], source, target)


@st.composite
def word_numbers(draw: st.DrawFn) -> list[int]:
    """Words of one to three tokens, then perhaps </s>."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    return [word for word, size in enumerate(sizes) for _ in range(size)] + draw(st.sampled_from([[], [-1]]))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1000), word_numbers(), word_numbers())
def test_words_get_the_sum_of_source_tokens_and_the_mean_of_target_tokens(
    seed: int, source: list[int], target: list[int]
) -> None:
    tokens = random_map(seed, source, target)
    words = to_words(tokens, keep_end=True)
    np.testing.assert_allclose(words.weights.sum(1), 1)
    for t, s in product(range(max(target) + 1), range(max(source) + 1)):
        rows = [i for i, word in enumerate(target) if word == t]
        columns = [i for i, word in enumerate(source) if word == s]
        expected = sum(tokens.weights[i, j] for i in rows for j in columns) / len(rows)
        assert words.weights[t, s] == pytest.approx(expected)
    dropped = to_words(tokens)
    assert dropped.weights.shape == (max(target) + 1, max(source) + 1)
    np.testing.assert_allclose(dropped.weights, words.weights[: max(target) + 1, : max(source) + 1])
    np.testing.assert_allclose(to_words(words, keep_end=True).weights, words.weights)  # words are their own words


def test_word_labels_default_to_joined_tokens() -> None:
    weights = np.array([[0.2, 0.3, 0.5]])
    tokens = AttentionMap(weights, ["▁un", "like", "</s>"], ["▁no"], [0, 0, -1], [0])
    assert list(to_words(tokens, keep_end=True).source_tokens) == ["unlike", "</s>"]
    named = AttentionMap(weights, ["un", "like", "</s>"], ["no"], [0, 0, -1], [0], ["Unlike", "cut off"], ["No"])
    words = to_words(named)
    assert (list(words.source_tokens), list(words.target_tokens)) == (["Unlike", "cut off"], ["No"])
    np.testing.assert_allclose(words.weights, [[0.5, 0]])  # a word without tokens was not looked at


def test_inconsistent_maps_are_rejected() -> None:
    with pytest.raises(ValueError, match="shape"):
        AttentionMap(np.ones((1, 2)), ["a"], ["b"], [0], [0])
    with pytest.raises(ValueError, match="word numbers"):
        AttentionMap(np.ones((1, 2)), ["a", "b"], ["b"], [0], [0])
    with pytest.raises(ValueError, match="no label"):
        AttentionMap(np.ones((1, 1)), ["a"], ["b"], [1], [0], ["a"], ["b"])


def test_combine_heads_selects_and_averages() -> None:
    cross = np.random.default_rng(0).dirichlet(np.ones(5), size=(3, 2, 4))  # L H T S
    np.testing.assert_allclose(combine_heads(cross).sum(-1), 1)
    np.testing.assert_allclose(combine_heads(cross), cross.reshape(6, 4, 5).mean(0))
    np.testing.assert_array_equal(combine_heads(cross, 1, 0), cross[1, 0])
    np.testing.assert_array_equal(combine_heads(cross, "last", 1), cross[2, 1])
    np.testing.assert_array_equal(combine_heads(cross, -1, 1), cross[2, 1])
    with pytest.raises(InputError, match="no layer 3: there are 3"):
        combine_heads(cross, 3)
    with pytest.raises(InputError, match="no head 2"):
        combine_heads(cross, "mean", 2)
    with pytest.raises(InputError, match="no attention"):
        combine_heads(cross[:0])


def test_links_follow_the_largest_weight_and_skip_the_end_token() -> None:
    weights = np.array([[0.1, 0.7, 0.2], [0.4, 0.1, 0.5], [0.5, 0.2, 0.3], [0.9, 0.1, 0.0]])
    attention = AttentionMap(weights, ["a", "b", "</s>"], ["x", "y", "z", "</s>"], [0, 1, -1], [0, 1, 2, -1])
    assert links(attention) == [(0, 2), (1, 0)]  # y looked at </s>: not linked
    assert links(attention, threshold=0.6) == [(1, 0)]
    assert links(to_words(attention)) == [(0, 1), (0, 2), (1, 0)]  # without </s>, y takes the best word
    assert links(AttentionMap(np.zeros((1, 2)), ["a", "b"], ["x"], [0, 1], [0])) == []


def test_symmetrisation_by_hand() -> None:
    forward, backward = [(0, 0), (1, 1), (3, 3)], [(0, 0), (1, 2), (4, 0)]
    assert symmetrise(forward, backward, "intersection") == [(0, 0)]
    assert symmetrise(forward, backward, "union") == [(0, 0), (1, 1), (1, 2), (3, 3), (4, 0)]
    # (1, 1) touches (0, 0); (1, 2) touches (1, 1) and brings in target 2; (3, 3) and (4, 0) touch nothing.
    assert symmetrise(forward, backward, "grow-diag") == [(0, 0), (1, 1), (1, 2)]
    assert symmetrise(forward, backward, "grow-diag-final-and") == [(0, 0), (1, 1), (1, 2), (3, 3)]


@given(LINKS, LINKS)
def test_symmetrisation_lies_between_intersection_and_union(one: set, other: set) -> None:
    grown = set(symmetrise(one, other, "grow-diag"))
    final = set(symmetrise(one, other, "grow-diag-final-and"))
    assert one & other <= grown <= final <= one | other
    assert grown == set(symmetrise(other, one, "grow-diag"))


@given(LINKS)
def test_pharaoh_round_trip(pairs: set) -> None:
    gold = parse_pharaoh(pharaoh(pairs))
    assert gold.sure == gold.possible == pairs


def test_pharaoh_by_hand() -> None:
    assert pharaoh([(1, 2), (0, 0), (1, 2), (0, 10), (0, 9)]) == "0-0 0-9 0-10 1-2"
    gold = parse_pharaoh("0-0 1?2 2p1\n")
    assert (gold.sure, gold.possible) == ({(0, 0)}, {(0, 0), (1, 2), (2, 1)})
    for line in ("0-", "a-b", "1_2", "-1-2", "0-0,1-1"):
        with pytest.raises(InputError, match="cannot read the link"):
            parse_pharaoh(line, where="gold.txt:3")


def test_alignment_error_rate_by_hand() -> None:
    sure, possible = {(0, 0), (1, 1)}, {(0, 0), (1, 1), (2, 1)}
    assert alignment_error_rate(sure, sure, possible) == 0
    assert alignment_error_rate(possible, sure, possible) == 0  # possible links cost nothing
    assert alignment_error_rate({(0, 0)}, sure, possible) == pytest.approx(1 - 2 / 3)
    assert alignment_error_rate({(0, 0), (5, 5)}, sure, possible) == pytest.approx(1 - 2 / 4)
    assert alignment_error_rate(set(), sure, possible) == 1
    assert alignment_error_rate(set(), set()) == 0
    assert alignment_error_rate({(0, 0, 0), (1, 0, 0)}, {(0, 0, 0), (1, 1, 1)}) == pytest.approx(0.5)  # two lines


def test_alignment_error_rate_equals_exhaustive_counting() -> None:
    cells = list(product(range(2), range(2)))
    subsets = [set(part) for part in chain.from_iterable(combinations(cells, n) for n in range(5))]
    for predicted, sure, extra in product(subsets, repeat=3):
        hits = sum((link in sure) + (link in sure or link in extra) for link in predicted)
        size = len(predicted) + len(sure)
        expected = 1 - hits / size if size else 0
        assert alignment_error_rate(predicted, sure, extra) == pytest.approx(expected)


def test_visible_labels_contain_no_control_or_direction_characters() -> None:
    assert visible(" ") == "␣"
    assert visible("a\tb\n") == "a\ufffdb\ufffd"
    assert visible("\x1b[31mred") == "\ufffd[31mred"
    assert visible("\u202eabc") == "abc"
    assert visible("\ud800") == "\ufffd"
    assert visible("می‌خواهم") == "می‌خواهم"
    assert visible("naïve 日本") == "naïve 日本"
