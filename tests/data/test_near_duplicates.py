"""MinHash against exact Jaccard similarities, and near duplicates against brute force."""

from __future__ import annotations

import random

import numpy as np

from transduce.data.near_duplicates import HASHES, NGRAM, first_rows, near_duplicates, signatures, similarity


def _ngrams(text: str) -> set[str]:
    text = "\0" * (NGRAM - 1) + " ".join(text.lower().split())
    return {text[place : place + NGRAM] for place in range(len(text) - NGRAM + 1)}


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


def _texts(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyzäöü", k=draw.randint(2, 9))) for _ in range(400)]
    return [" ".join(draw.choices(words, k=12)) for _ in range(count)]


def _changed(text: str, words: int, draw: random.Random) -> str:
    parts = text.split()
    for place in draw.sample(range(len(parts)), words):
        parts[place] = "".join(draw.choices("abcdefgh", k=6))
    return " ".join(parts)


def test_equal_values_estimate_the_jaccard_similarity() -> None:
    draw, errors = random.Random(2), []
    for text in _texts(150):
        for words in (1, 2, 4, 8):
            other = _changed(text, words, draw)
            exact = _jaccard(_ngrams(text), _ngrams(other))
            estimate = similarity(*signatures([text, other]))
            errors.append((estimate - exact) / np.sqrt(exact * (1 - exact) / HASHES))
    # 600 estimates, each a binomial mean: unbiased, with the standard deviation of one.
    assert abs(np.mean(errors)) < 0.25
    assert 0.85 < np.std(errors) < 1.15


def test_signatures_do_not_depend_on_the_other_texts() -> None:
    texts = ["", "a", "  A ", *_texts(300), "ß" * 40_000, ""]
    whole = signatures(texts)
    alone = np.concatenate([signatures([text]) for text in texts])
    assert np.array_equal(whole, alone)
    assert np.array_equal(whole[1], whole[2])
    assert not np.array_equal(whole[0], whole[1])
    assert signatures([]).shape == (0, HASHES)


def test_near_duplicates_are_those_of_brute_force() -> None:
    draw = random.Random(3)
    originals = _texts(120)
    close = [_changed(text, 1, draw) for text in originals[:40]]  # one of twelve words: about 0.8
    texts = [*originals, *close, *(text.upper() for text in originals[40:60]), *_texts(100, seed=9)]
    found = near_duplicates(signatures(texts), 0.7)
    sets = [_ngrams(text) for text in texts]
    best = [max((_jaccard(own, before) for before in sets[:row]), default=0.0) for row, own in enumerate(sets)]
    for row, jaccard in enumerate(best):  # the standard error of an estimate of 0.7 is 0.06
        assert found[row] or jaccard < 0.88, (row, jaccard)
        assert not found[row] or jaccard > 0.5, (row, jaccard)
    assert found.sum() > 40


def test_first_rows_are_those_of_brute_force() -> None:
    keys = np.random.default_rng(1).integers(0, 40, 200, np.uint64)
    assert first_rows(keys).tolist() == [keys.tolist().index(key) for key in keys.tolist()]
