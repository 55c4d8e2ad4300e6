"""Noise: which tokens change, how many, and determinism by seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.noise import (
    HELD_OUT,
    NOISES,
    NoNoise,
    SentencePermutation,
    TokenMasking,
    add_noise,
    delete_tokens,
    mask_spans,
    permute_sentences,
)
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.flow import BOS, EOS, UNK, Batch, Padded

MASK, STOP = 3, 4
IDS = st.lists(st.integers(5, 30), max_size=40)
SEED = st.integers(0, 10**6)


def is_within(part: list[int], whole: list[int]) -> bool:
    left = iter(whole)
    return all(token in left for token in part)


@given(IDS, st.floats(0, 1), SEED)
def test_deletion_only_removes_tokens(ids: list[int], rate: float, seed: int) -> None:
    found = delete_tokens(ids, rate=rate, rng=Random(seed))
    assert is_within(found, ids)
    assert found == delete_tokens(ids, rate=rate, rng=Random(seed))
    assert delete_tokens(ids, rate=0, rng=Random(seed)) == ids
    assert delete_tokens(ids, rate=1, rng=Random(seed)) == []


@given(IDS, st.floats(0, 1), st.floats(0.5, 6), SEED)
def test_text_infilling_replaces_spans_by_masks(ids: list[int], rate: float, length: float, seed: int) -> None:
    found = mask_spans(ids, rate=rate, mask=MASK, rng=Random(seed), mean=length)
    kept = [token for token in found if token != MASK]
    assert is_within(kept, ids)
    assert abs(len(ids) - len(kept) - rate * len(ids)) < 1
    assert len(found) <= len(ids)
    assert (MASK, MASK) not in pairwise(found)
    assert (MASK in found) == (len(kept) < len(ids))
    assert found == mask_spans(ids, rate=rate, mask=MASK, rng=Random(seed), mean=length)
    assert mask_spans(ids, rate=0, mask=MASK, rng=Random(seed)) == ids


@given(IDS.filter(lambda ids: len(set(ids)) == len(ids)), st.floats(0, 1), SEED)
def test_infilled_mask_stands_where_tokens_were_removed(ids: list[int], rate: float, seed: int) -> None:
    """With all tokens different, filling each mask with the gap between its neighbours gives the whole again."""
    found = mask_spans(ids, rate=rate, mask=MASK, rng=Random(seed))
    filled: list[int] = []
    for place, token in enumerate(found):
        if token == MASK:
            after = found[place + 1] if place + 1 < len(found) else None
            end = ids.index(after) if after is not None else len(ids)
            filled += ids[len(filled) : end]
        else:
            filled.append(token)
    assert filled == ids


def test_span_lengths_follow_the_mean() -> None:
    for wanted in (1.0, 3.0):
        ids = list(range(5, 5005))
        masks = mask_spans(ids, rate=0.3, mask=MASK, rng=Random(1), mean=wanted).count(MASK)
        assert 1500 / masks == pytest.approx(wanted, rel=0.1)


def test_deletion_follows_its_rate() -> None:
    shares = [len(delete_tokens(range(100), rate=0.3, rng=Random(seed))) / 100 for seed in range(100)]
    assert mean(shares) == pytest.approx(0.7, abs=0.02)


@given(st.lists(st.integers(STOP, 8), max_size=30), SEED)
def test_permutation_moves_complete_sentences(ids: list[int], seed: int) -> None:
    def parts(tokens: list[int]) -> Counter[tuple[int, ...]]:
        text = "".join(map(str, tokens)).replace(str(STOP), f"{STOP}|")
        return Counter(tuple(map(int, part)) for part in text.split("|") if part)

    whole = [*ids, STOP]  # an open part at the end would join the one that comes to stand after it
    found = permute_sentences(whole, ends={STOP}, rng=Random(seed))
    assert parts(found) == parts(whole)
    assert found == permute_sentences(whole, ends={STOP}, rng=Random(seed))


def test_permutation_changes_the_order() -> None:
    ids = [5, STOP, 6, STOP, 7, STOP]
    orders = {tuple(permute_sentences(ids, ends=[STOP], rng=Random(seed))) for seed in range(60)}
    assert len(orders) == 6


WORDS = Tokenizer.train(["a b c d e f g h i j k l . ;"], "words", 100)
PIECES = Tokenizer.train(["banana bandana cabana ananas"] * 20, "bpe", 290)
KNOWN = st.lists(st.integers(4, WORDS.size - 1), min_size=1, max_size=40)


def clean(rows: list[list[int]]) -> Batch:
    return Batch(target=Padded.from_rows([[BOS, *row, EOS] for row in rows]), rows=tuple(range(7, 7 + len(rows))))


@given(KNOWN, SEED)
def test_only_selected_tokens_change_and_count_in_the_loss(ids: list[int], seed: int) -> None:
    found = TokenMasking(WORDS)(ids, Random(seed))
    assert len(found.ids) == len(found.loss_mask) == len(ids)
    assert all(asked or now == before for now, before, asked in zip(found.ids, ids, found.loss_mask, strict=True))
    assert max(1, int(0.15 * len(ids))) <= sum(found.loss_mask) <= max(1, int(0.15 * len(ids)) + 1)
    assert set(found.ids) <= {UNK, *range(4, WORDS.size)}


def test_selected_tokens_are_masked_replaced_or_unchanged_by_share() -> None:
    ids = [4 + number % (WORDS.size - 4) for number in range(30_000)]
    found = TokenMasking(WORDS)(ids, Random(1))
    asked = [(now, before) for now, before, wanted in zip(found.ids, ids, found.loss_mask, strict=True) if wanted]
    assert len(asked) / len(ids) == pytest.approx(0.15, abs=0.001)
    assert sum(now == UNK for now, _ in asked) / len(asked) == pytest.approx(0.8, abs=0.02)
    assert sum(now == before for now, before in asked) / len(asked) == pytest.approx(0.1, abs=0.03)


def test_unknown_words_never_count_in_the_loss() -> None:
    for seed in range(50):
        found = TokenMasking(WORDS, rate=1.0)([5, UNK, 6], Random(seed))
        assert found.loss_mask == [True, False, True]
    assert NoNoise(WORDS)([5, UNK, 6], Random(1)).loss_mask == [True, False, True]
    assert TokenMasking(WORDS)([UNK, UNK], Random(1)).loss_mask == [False, False]
    with pytest.raises(InputError, match="exceed 100"):
        TokenMasking(WORDS, masked=0.8, replaced=0.3)


@given(SEED)
def test_whole_word_masking_masks_complete_words(seed: int) -> None:
    ids = PIECES.encode("banana cabbage ban nab bandana").ids
    words = [sum(PIECES.word_starts[one] for one in ids[: place + 1]) for place in range(len(ids))]
    assert len(set(words)) < len(ids)
    found = TokenMasking(PIECES, rate=0.3, whole_words=True)(ids, Random(seed))
    for word in set(words):
        assert len({asked for asked, own in zip(found.loss_mask, words, strict=True) if own == word}) == 1


def test_sentences_end_at_the_given_characters() -> None:
    ids = WORDS.encode("a b . c d ; e .").ids
    orders = {WORDS.decode(SentencePermutation(WORDS)(ids, Random(seed)).ids) for seed in range(40)}
    assert "e . a b . c d ;" in orders
    assert len(orders) == 6


@pytest.mark.parametrize("kind", NOISES)
def test_noise_depends_only_on_seed_epoch_and_row(kind: str) -> None:
    noise, rows = NOISES[kind](WORDS), [[5, 6, 7, 8, 9, 16, 11, 17] * 3, [9, 8, 16, 6] * 4]
    both = add_noise(clean(rows), noise, 1, 3)
    alone = add_noise(clean(rows).select(Padded.from_rows([[1]]).values[0]), noise, 1, 3)
    second = both.select(Padded.from_rows([[1]]).values[0])
    assert second.source.values.tolist() == alone.source.values.tolist()
    assert both.target is not None
    assert both.source.mask.sum(1).tolist() == [row.index(EOS) + 1 for row in both.source.values.tolist()]
    if both.loss_mask is not None:
        assert both.loss_mask.values.shape == both.target.values.shape
        assert not both.labels.mask[both.labels.values == EOS].any()
    if kind != "nothing":
        differing = [add_noise(clean(rows), noise, *key).source.values.tolist() for key in ((1, 3), (1, 4), (2, 3))]
        assert differing[0] not in differing[1:]
    held = [add_noise(clean(rows), noise, 1).source.values.tolist() for _ in range(2)]
    assert held[0] == held[1] == add_noise(clean(rows), noise, 1, HELD_OUT).source.values.tolist()
