"""Law 5, for every model: scores add up, beam 1 is greedy, a beam as wide as the space is exhaustive search."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from contract_fixtures import CASES, SIZE, example_batch, make, shared, take_turns

from transduce.contracts import Strategy
from transduce.decoders import DECODERS
from transduce.decoding.logits_processors import MinLength, NoRepeatNgram, RepetitionPenalty, SuppressTokens
from transduce.decoding.search import score, search, stream_search
from transduce.decoding.strategies import Beam, Greedy, HuggingFaceBeam, Sample
from transduce.flow import BOS, EOS, Batch, Hypothesis, Padded

LONGEST = 5
SEEDS = [7, 8, 9, 10]


def longest(batch: Batch, most: int = LONGEST) -> torch.Tensor:
    return torch.full((batch.size,), most)


def with_targets(batch: Batch, rows: list[tuple[int, ...]]) -> Batch:
    return Batch(batch.source, Padded.from_rows([[BOS, *ids] for ids in rows]))


STRATEGIES = [
    Greedy(),
    Beam(width=4, length_penalty=0.0),
    Beam(width=3, length_penalty=1.0),
    HuggingFaceBeam(width=3, length_penalty=1.0, stop="bound"),
    Sample(width=2, temperature=0.8, top_k=6, top_p=0.9),
]


@cache
def together(case: str, strategy: Strategy) -> list[list[Hypothesis]]:
    """What a search over the whole batch finds: several laws of a case compare with it."""
    batch = example_batch([(5, 3), (2, 4), (7, 1), (1, 2)])
    return search(shared(case), batch, strategy, max_lengths=longest(batch), seeds=SEEDS)


def strategy_of(case: str) -> Strategy:
    """What else a strategy does with the logits of a step is no part of a model; all models are searched greedily."""
    return take_turns(case, STRATEGIES[1:])


def test_every_kind_of_decoder_meets_every_strategy():
    met = {(case.rpartition(">")[2].partition(",")[0].partition("+")[0], strategy_of(case)) for case in CASES}
    assert met == set(itertools.product(DECODERS, STRATEGIES[1:]))


def test_scores_add_up(case, model, batch):
    for strategy in (Greedy(), strategy_of(case)):
        check_scores(model, batch, together(case, strategy))


def check_scores(model, batch, found):
    ranks = min(map(len, found))
    rows = [hypotheses[rank] for rank in range(ranks) for hypotheses in found]
    again = score(model, with_targets(batch.select(torch.arange(batch.size).repeat(ranks)), [row.ids for row in rows]))
    for row, scores in zip(rows, again, strict=True):
        assert row.score == pytest.approx(sum(row.token_scores))
        assert row.token_scores == pytest.approx(scores, abs=2e-4)
        assert row.complete == (row.ids[-1] == EOS)
        assert row.complete or len(row.ids) == LONGEST


def test_beam_one_is_greedy(case, model, batch):
    """Under any length penalty, which is no part of a model: every kind of decoder meets each of them."""
    penalty = take_turns(case, (0.0, 1.0, 2.0))
    beam = search(model, batch, Beam(width=1, length_penalty=penalty), max_lengths=longest(batch))
    assert [row[0].ids for row in beam] == [row[0].ids for row in together(case, Greedy())]


def test_greedy_tokens_are_the_most_probable(case, model, batch):
    check_greedy(model, batch, together(case, Greedy()))


@torch.no_grad()
def check_greedy(model, batch, found):
    """Against one pass over the whole output, without a cache: every token is the best after those before it."""
    rows = [hypotheses[0].ids for hypotheses in found]
    outputs = with_targets(batch, rows).target
    logits = model.advance(outputs.values[:, :-1], model.start(batch)).logits
    logits[..., [0, BOS]] = -torch.inf
    for ids, best in zip(rows, logits.argmax(-1).tolist(), strict=True):
        assert list(ids) == best[: len(ids)]
        assert EOS not in ids[:-1]
        assert ids[-1] == EOS or len(ids) == LONGEST


def test_outputs_do_not_depend_on_the_batch(case, model, batch):
    """One source alone, and the others in another order."""
    strategy, lonely = strategy_of(case), take_turns(case, range(batch.size), shift=1)
    for rows in ([lonely], [row for row in reversed(range(batch.size)) if row != lonely]):
        some = batch.select(torch.tensor(rows))
        found = search(model, some, strategy, max_lengths=longest(some), seeds=[SEEDS[row] for row in rows])
        for row, hypotheses in zip(rows, found, strict=True):
            assert [one.ids for one in hypotheses] == [one.ids for one in together(case, strategy)[row]]


def test_a_wide_beam_is_exhaustive(case, model):
    """With few words allowed, every sequence is scored by brute force; the beam must find the best ones, in order.

    The length penalty is no part of a model: every kind of decoder meets both.
    """
    batch = example_batch([(3, 2), (5, 2)])
    words, most = [4, 5, 6], 3
    banned = [SuppressTokens(tokens=[token for token in range(SIZE) if token not in (*words, EOS)])]
    space = [(*ids, EOS) for length in range(most) for ids in itertools.product(words, repeat=length)]
    every = batch.select(torch.arange(batch.size).repeat_interleave(len(space)))
    totals = [sum(scores) for scores in score(model, with_targets(every, space * batch.size))]
    penalty = take_turns(case, (0.0, 1.0))
    strategy = Beam(width=60, length_penalty=penalty)
    found = search(model, batch, strategy, max_lengths=longest(batch, most), processors=banned)
    for row in range(batch.size):
        scored = zip(totals[row * len(space) :], space, strict=False)
        ranked = sorted(scored, key=lambda pair: -pair[0] / len(pair[1]) ** penalty)
        complete = [one for one in found[row] if one.complete]
        assert len(complete) == len(space)
        expected = [total / len(ids) ** penalty for total, ids in ranked]
        assert [one.rank for one in complete] == pytest.approx(expected, abs=1e-3)
        assert complete[0].ids == ranked[0][1] or math.isclose(expected[0], expected[1], abs_tol=1e-3)


FEW = [name for name in CASES if name in ("recurrent>recurrent", "transformer>transformer", "alone>transformer")]


@pytest.fixture(params=FEW)
def some(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make(request.param)


@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_fewer_answers_are_the_first_of_all(some, batch, strategy, best):
    """Rows that could not come among them are given up on the way."""
    every = search(some, batch, strategy, max_lengths=longest(batch))
    few = search(some, batch, strategy, max_lengths=longest(batch), nbest=best)
    for line, first in zip(every, few, strict=True):
        assert [one.ids for one in first] == [one.ids for one in line[:best]]


def test_a_prefix_is_kept_and_scored(some, batch):
    prefixes = [[4, 5], [6], [5, 5, 7], []]
    found = search(some, batch, Beam(width=3), max_lengths=longest(batch), prefix=Padded.from_rows(prefixes))
    for prefix, hypotheses in zip(prefixes, found, strict=True):
        assert all(list(one.ids[: len(prefix)]) == prefix for one in hypotheses)
    again = score(some, with_targets(batch, [row[0].ids for row in found]))
    for row, scores in zip(found, again, strict=True):
        assert row[0].token_scores == pytest.approx(scores, abs=2e-4)


def test_logits_processors_hold_in_every_output(some, batch):
    no_end = search(some, batch, Greedy(), max_lengths=longest(batch), processors=[MinLength(length=LONGEST)])
    assert all(EOS not in row[0].ids for row in no_end)
    once = search(
        some, batch, Beam(width=2), max_lengths=longest(batch), processors=[NoRepeatNgram(size=1), MinLength(length=5)]
    )
    assert all(len(set(one.ids)) == len(one.ids) for row in once for one in row)
    pairs = search(
        some, batch, Greedy(), max_lengths=longest(batch, 12), processors=[NoRepeatNgram(size=2), MinLength(length=12)]
    )
    for row in pairs:
        seen = list(itertools.pairwise(row[0].ids))
        assert len(seen) == len(set(seen))


def test_repetition_penalty_lowers_generated_tokens():
    scores = torch.full((1, 8), -1.0)
    changed = RepetitionPenalty(penalty=2.0).apply(scores, torch.tensor([[5, 5, 6]]))
    assert changed.tolist() == [[-1, -1, -1, -1, -1, -2, -2, -1]]


def test_early_stop_is_correct(some, batch):
    """No hypothesis that a search without stopping would rank higher is missed."""

    class Patient(Beam):
        def bound(self, totals: torch.Tensor, longest: torch.Tensor) -> torch.Tensor:
            return totals.masked_fill(totals > -torch.inf, torch.inf)

    for penalty in (0.0, 0.6, 1.5):
        quick = search(some, batch, Beam(width=4, length_penalty=penalty), max_lengths=longest(batch, 12))
        slow = search(some, batch, Patient(width=4, length_penalty=penalty), max_lengths=longest(batch, 12))
        for one, other in zip(quick, slow, strict=True):
            complete = [h.ids for h in other if h.complete]
            assert [h.ids for h in one if h.complete][: len(complete)] == complete


def test_samples_follow_the_distribution():
    model, batch = make("recurrent>transformer"), example_batch([(4, 2)])
    probabilities = model.advance(torch.tensor([[BOS]]), model.start(batch)).logits[0, -1].softmax(-1)
    many = search(model, batch, Sample(width=4000), max_lengths=torch.tensor([1]), seeds=[5])[0]
    counts = torch.bincount(torch.tensor([one.ids[0] for one in many]), minlength=SIZE) / len(many)
    allowed = probabilities.clone()
    allowed[[0, BOS]] = 0
    assert (counts - allowed / allowed.sum()).abs().max() < 0.03
    best = allowed.topk(2).indices.tolist()
    few = search(model, batch, Sample(width=200, top_k=2), max_lengths=torch.tensor([1]), seeds=[5])[0]
    assert {one.ids[0] for one in few} == set(best)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("case", ["transformer>transformer", "recurrent>recurrent", "alone>transformer"])
def test_streamed_tokens_are_those_of_the_search(case, strategy):
    """All tokens and scores of the best hypothesis."""
    model, batch = shared(case), example_batch([(5, 3)])
    limits = {"max_lengths": longest(batch), "seeds": SEEDS[:1]}
    best = search(model, batch, strategy, nbest=1, **limits)[0][0]
    found = list(stream_search(model, batch, strategy, **limits))
    assert tuple(token for token, _ in found) == best.ids
    assert [score for _, score in found] == pytest.approx(best.token_scores, abs=1e-5)


def test_a_greedy_token_is_given_before_the_next_step(monkeypatch):
    model, batch, steps = shared("recurrent>recurrent"), example_batch([(5, 3)]), []
    advance = type(model).advance
    monkeypatch.setattr(type(model), "advance", lambda *args, **more: steps.append(1) or advance(*args, **more))
    counts = [len(steps) for _ in stream_search(model, batch, Greedy(), max_lengths=longest(batch))]
    assert counts == list(range(1, len(counts) + 1))
