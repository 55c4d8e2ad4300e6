"""Laws of lexical constraints, for every model: all outputs satisfy them, and without them nothing changes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from contract_fixtures import CASES, SIZE, example_batch, shared, take_turns
from test_search_laws import STRATEGIES, longest, with_targets

from transduce.decoders import DECODERS
from transduce.decoding.logits_processors import NoRepeatNgram, SuppressTokens, contained
from transduce.decoding.search import score, search
from transduce.decoding.strategies import Beam
from transduce.flow import EOS, LexicalConstraints, Padded

TRANSFORMER = "transformer>transformer"
LONGEST = 7  # all required phrases and </s>


def contains(ids: tuple[int, ...], phrase: list[int]) -> bool:
    return any(list(ids[start : start + len(phrase)]) == phrase for start in range(len(ids)))


def satisfied(ids: tuple[int, ...], required: list[list[list[int]]], banned: list[list[int]]) -> bool:
    fulfilled = all(any(contains(ids, phrase) for phrase in alternatives) for alternatives in required)
    return fulfilled and not any(contains(ids, phrase) for phrase in banned)


def random_phrases(draw: random.Random, tokens: range, count: int, longest: int) -> list[list[int]]:
    return [[draw.choice(tokens) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def random_constraints(draw: random.Random) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Required phrases of at most 6 tokens in all, and banned ones that no required phrase or joint can contain."""
    words = range(4, 9)
    required = [random_phrases(draw, words, draw.randint(1, 2), 3) for _ in range(draw.randint(0, 2))]
    return required, [[9], *([token, 10] for token in (9, 10))]


def decoder_of(case: str) -> str:
    return case.rpartition(">")[2].partition(",")[0].partition("+")[0]


THINNED = [
    (case, strategy)
    for decoder in DECODERS
    for case, strategy in zip([case for case in CASES if decoder_of(case) == decoder], STRATEGIES, strict=False)
]


def test_every_kind_of_decoder_is_constrained():
    assert {decoder_of(case) for case, _ in THINNED} == set(DECODERS)


@pytest.mark.parametrize(("case", "strategy"), THINNED, ids=lambda one: one if isinstance(one, str) else "")
def test_all_outputs_satisfy_their_constraints(case, strategy, batch):
    """Phrases with alternatives, overlapping ones, as many tokens as an output may have; each source has its own."""
    draw, model = random.Random(case), shared(case)
    rows = [random_constraints(draw) for _ in range(batch.size)]
    constraints = LexicalConstraints.from_rows([one for one, _ in rows], [one for _, one in rows])
    processors = take_turns(case, [(), (NoRepeatNgram(size=1),), (SuppressTokens(tokens=[4, 5]),)])
    found = search(
        model, batch, strategy, max_lengths=longest(batch, LONGEST), seeds=[1, 2, 3, 4], constraints=constraints,
        processors=processors,
    )  # fmt: skip
    for (required, banned), hypotheses in zip(rows, found, strict=True):
        assert hypotheses
        for one in hypotheses:
            assert satisfied(one.ids, required, banned), (one.ids, required, banned)
            assert len(one.ids) <= LONGEST


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
def test_empty_constraints_are_the_search_without_them(strategy):
    """A beam of transformers continues finished hypotheses by others, which banks do not."""
    if type(strategy).__name__ == "HuggingFaceBeam":
        strategy = Beam(width=3)
    model, batch = shared(TRANSFORMER), example_batch([(5, 4), (2, 6), (7, 1), (1, 3)])
    none = LexicalConstraints.from_rows([[]] * 4, [[]] * 4)
    plain = search(model, batch, strategy, max_lengths=longest(batch))
    with_none = search(model, batch, strategy, max_lengths=longest(batch), constraints=none)
    assert [[one.ids for one in line] for line in with_none] == [[one.ids for one in line] for line in plain]


def test_a_wide_beam_finds_the_best_output_that_satisfies_the_constraints():
    model, batch = shared("recurrent>recurrent"), example_batch([(3, 2), (5, 2)])
    words, most = [4, 5, 6], 5
    required, banned = [[[4, 5], [6, 6, 6]]], [[6, 5]]
    suppressed = [SuppressTokens(tokens=[token for token in range(SIZE) if token not in (*words, EOS)])]
    space = [(*ids, EOS) for length in range(most) for ids in itertools.product(words, repeat=length)]
    space = [ids for ids in space if satisfied(ids, required, banned)]
    every = batch.select(torch.arange(batch.size).repeat_interleave(len(space)))
    totals = [sum(scores) for scores in score(model, with_targets(every, space * batch.size))]
    constraints = LexicalConstraints.from_rows([required] * 2, [banned] * 2)
    found = search(
        model, batch, Beam(width=200, length_penalty=0.0), max_lengths=longest(batch, most), processors=suppressed,
        constraints=constraints,
    )  # fmt: skip
    for row in range(batch.size):
        ranked = sorted(zip(totals[row * len(space) :], space, strict=False), reverse=True)
        assert found[row][0].ids == ranked[0][1]
        assert {one.ids for one in found[row] if one.complete} == set(space)


def test_constraints_after_a_prefix_and_alone_or_together():
    model, batch = shared(TRANSFORMER), example_batch([(5, 4), (2, 6), (7, 1)])
    required = [[[[4, 5, 6]]], [[[7]], [[8, 8]]], []]
    constraints, prefix = (
        LexicalConstraints.from_rows(required, [[], [[5]], [[6]]]),
        Padded.from_rows([[4, 5], [7], []]),
    )
    found = search(model, batch, Beam(width=4), max_lengths=longest(batch), prefix=prefix, constraints=constraints)
    for row in range(batch.size):
        alone = search(
            model, batch.select(torch.tensor([row])), Beam(width=4), max_lengths=longest(batch)[:1],
            prefix=prefix.select(torch.tensor([row])), constraints=constraints.select(torch.tensor([row])),
        )  # fmt: skip
        assert [one.ids for one in alone[0]] == [one.ids for one in found[row]]
        assert all(satisfied(one.ids, required[row], []) for one in found[row])


def test_contained_phrases_are_found_by_brute_force():
    draw = random.Random(5)
    texts = [[draw.choice(range(4, 7)) for _ in range(6)] for _ in range(40)]
    required = [random_phrases(draw, range(4, 7), 2, 3) for _ in range(3)]
    constraints = LexicalConstraints.from_rows([required], [[]])
    found = contained(torch.tensor(texts)[None], constraints.required)[0].tolist()
    assert found == [[any(contains(tuple(text), one) for one in phrase) for phrase in required] for text in texts]
