"""Noise: what it may change, how much, and that a seed says it all."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.noise import delete_tokens, mask_spans, permute_parts

MASK, STOP = 3, 4
IDS = st.lists(st.integers(5, 30), max_size=40)
SEED = st.integers(0, 10**6)


def is_within(part: list[int], whole: list[int]) -> bool:
    left = iter(whole)
    return all(token in left for token in part)


@given(IDS, st.floats(0, 1), SEED)
def test_deletion_only_leaves_out(ids: list[int], rate: float, seed: int) -> None:
    found = delete_tokens(ids, rate=rate, seed=seed)
    assert is_within(found, ids)
    assert found == delete_tokens(ids, rate=rate, seed=seed)
    assert delete_tokens(ids, rate=0, seed=seed) == ids
    assert delete_tokens(ids, rate=1, seed=seed) == []


@given(IDS, st.floats(0, 1), st.floats(0.5, 6), SEED)
def test_masked_spans(ids: list[int], rate: float, length: float, seed: int) -> None:
    found = mask_spans(ids, rate=rate, mask=MASK, seed=seed, mean=length)
    kept = [token for token in found if token != MASK]
    assert is_within(kept, ids)
    assert len(kept) == len(ids) - round(rate * len(ids))
    assert (MASK, MASK) not in pairwise(found)
    assert (MASK in found) == (len(kept) < len(ids))
    assert found == mask_spans(ids, rate=rate, mask=MASK, seed=seed, mean=length)
    assert mask_spans(ids, rate=0, mask=MASK, seed=seed) == ids


@given(IDS.filter(lambda ids: len(set(ids)) == len(ids)), st.floats(0, 1), SEED)
def test_what_is_gone_was_where_the_mask_stands(ids: list[int], rate: float, seed: int) -> None:
    """With all tokens different, filling each mask with the gap between its neighbours gives the whole again."""
    found = mask_spans(ids, rate=rate, mask=MASK, seed=seed)
    filled: list[int] = []
    for place, token in enumerate(found):
        if token == MASK:
            after = found[place + 1] if place + 1 < len(found) else None
            end = ids.index(after) if after is not None else len(ids)
            filled += ids[len(filled) : end]
        else:
            filled.append(token)
    assert filled == ids


def test_spans_are_as_long_as_asked_for() -> None:
    for wanted in (1.0, 3.0):
        ids = list(range(5, 5005))
        masks = mask_spans(ids, rate=0.3, mask=MASK, seed=1, mean=wanted).count(MASK)
        assert 1500 / masks == pytest.approx(wanted, rel=0.1)


def test_deletion_keeps_its_rate() -> None:
    shares = [len(delete_tokens(range(100), rate=0.3, seed=seed)) / 100 for seed in range(100)]
    assert mean(shares) == pytest.approx(0.7, abs=0.02)


@given(st.lists(st.integers(STOP, 8), max_size=30), SEED)
def test_permutation_moves_whole_parts(ids: list[int], seed: int) -> None:
    def parts(tokens: list[int]) -> Counter[tuple[int, ...]]:
        text = "".join(map(str, tokens)).replace(str(STOP), f"{STOP}|")
        return Counter(tuple(map(int, part)) for part in text.split("|") if part)

    whole = [*ids, STOP]  # an open part at the end would join the one that comes to stand after it
    found = permute_parts(whole, ends={STOP}, seed=seed)
    assert parts(found) == parts(whole)
    assert found == permute_parts(whole, ends={STOP}, seed=seed)


def test_permutation_does_permute() -> None:
    ids = [5, STOP, 6, STOP, 7, STOP]
    orders = {tuple(permute_parts(ids, ends=[STOP], seed=seed)) for seed in range(60)}
    assert len(orders) == 6
