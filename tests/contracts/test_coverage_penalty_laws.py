"""Laws of the coverage penalty, for every decoder with cross-attention: ranks by brute force, any batch, no penalty."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from contract_fixtures import CASES, SIZE, WITHOUT_CROSS_ATTENTION, example_batch, shared
from test_search_laws import longest, with_targets

from transduce.attention.scores import NORMALISERS
from transduce.decoders import DECODERS
from transduce.decoding.continuous_batching import SearchRequest, continuous_search
from transduce.decoding.logits_processors import SuppressTokens
from transduce.decoding.search import score, search
from transduce.decoding.strategies import Beam, DiverseBeam, HuggingFaceBeam
from transduce.errors import InputError
from transduce.flow import EOS, Batch, Padded
from transduce.inference.ensemble import Ensemble
from transduce.inference.lowering import lower_network
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe

BETA = 0.3
TRANSFORMER = "transformer>transformer"
ATTENDING = [decoder for decoder in DECODERS if decoder not in WITHOUT_CROSS_ATTENTION]
KINDS = [f"recurrent>{decoder}" for decoder in ATTENDING]
SPARSE = [next(case for case in CASES if f"-{name}" in case and ">recurrent" in case) for name in NORMALISERS]
SPECIAL = [next(case for case in CASES if part in case) for part in ("+copy", "+ctc", "multi_source>edit_transducer")]
WALKED = [case for case in dict.fromkeys((TRANSFORMER, *KINDS, *SPARSE, *SPECIAL)) if case in CASES]


def decoder_kind(case: str) -> str:
    return case.rpartition(">")[2].partition(",")[0].partition("+")[0]


def test_every_decoder_and_normaliser_is_walked():
    assert {decoder_kind(case) for case in WALKED} == set(ATTENDING)
    assert len(set(SPARSE)) == len(NORMALISERS)


@torch.no_grad()
def brute_force_ranks(model, batch: Batch, rows, power: float, beta: float) -> list[float]:
    """log p / length ** power + beta * sum_i log min(sum_t a_ti, 1) of one hypothesis for each source."""
    target = with_targets(batch, [one.ids for one in rows])
    weights = model(target, with_attention=True).attention.cross.double().mean((1, 2))  # B T S
    memory = model.memory_mask(model.start(batch))
    totals = [sum(scores) for scores in score(model, target)]
    ranks = []
    for row, one in enumerate(rows):
        penalty = 0.0
        for position in memory[row].nonzero().flatten().tolist():
            covered = sum(weights[row, step, position].item() for step in range(len(one.ids)))
            penalty += float(torch.tensor(min(max(covered, 1e-6), 1.0)).log())
        ranks.append(totals[row] / len(one.ids) ** power + beta * penalty)
    return ranks


@cache
def found_in(case: str):
    batch = example_batch([(5, 4), (2, 6), (7, 1), (1, 3)])
    return batch, search(shared(case), batch, Beam(width=3, coverage_penalty=BETA), max_lengths=longest(batch))


@pytest.mark.parametrize("case", WALKED)
def test_rank_is_that_of_brute_force(case):
    batch, found = found_in(case)
    for place in (0, min(map(len, found)) - 1):
        rows = [line[place] for line in found]
        expected = brute_force_ranks(shared(case), batch, rows, 1.0, BETA)
        assert [one.rank for one in rows] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("case", WALKED)
def test_outputs_do_not_depend_on_the_batch(case):
    batch, found = found_in(case)
    for row in (1, 2):
        alone = search(
            shared(case), batch.select(torch.tensor([row])), Beam(width=3, coverage_penalty=BETA),
            max_lengths=longest(batch)[:1],
        )  # fmt: skip
        assert [one.ids for one in alone[0]] == [one.ids for one in found[row]]
        assert [one.rank for one in alone[0]] == pytest.approx([one.rank for one in found[row]], abs=1e-3)


@pytest.mark.parametrize("kind", [Beam, HuggingFaceBeam, DiverseBeam])
def test_a_penalty_of_0_is_plain_beam_search(kind):
    batch = example_batch([(5, 4), (2, 6), (7, 1), (1, 3)])
    for case in (TRANSFORMER, "recurrent>recurrent"):
        plain = search(shared(case), batch, kind(width=3), max_lengths=longest(batch))
        for beta in (0.0, 1e-12):  # with the second, coverage is computed all the same
            none = search(shared(case), batch, kind(width=3, coverage_penalty=beta), max_lengths=longest(batch))
            assert [[one.ids for one in line] for line in none] == [[one.ids for one in line] for line in plain]


@pytest.mark.parametrize("kind", [Beam, HuggingFaceBeam])
def test_a_wide_beam_finds_the_best_rank_of_all_outputs(kind):
    """The bound of a row never forgets the penalty: fewer results are the first of all."""
    model, batch = shared("recurrent>recurrent"), example_batch([(6, 2), (5, 2)])
    words, most, beta = [4, 5, 6], 3, 1.0
    banned = [SuppressTokens(tokens=[token for token in range(SIZE) if token not in (*words, EOS)])]
    options = {"max_lengths": longest(batch, most), "processors": banned}
    strategy = kind(width=60, length_penalty=0.5, coverage_penalty=beta)
    every = search(model, batch, strategy, **options)
    plain = search(model, batch, kind(width=60, length_penalty=0.5), **options)
    space = {(*ids, EOS) for length in range(most) for ids in itertools.product(words, repeat=length)}
    for row, line in enumerate(every):
        complete = [one for one in line if one.complete]
        assert {one.ids for one in complete} == space
        some = batch.select(torch.tensor([row] * len(complete)))
        assert [one.rank for one in complete] == pytest.approx(
            brute_force_ranks(model, some, complete, 0.5, beta), abs=2e-3
        )
        assert [one.rank for one in complete] == sorted((one.rank for one in complete), reverse=True)
        assert [one.ids for one in complete] != [one.ids for one in plain[row] if one.complete]
    best = search(model, batch, strategy, nbest=1, **options)
    assert [line[0].ids for line in best] == [line[0].ids for line in every]


def test_a_prefix_counts_in_the_coverage():
    model, batch = shared(TRANSFORMER), example_batch([(5, 4), (2, 6)])
    strategy, prefix = Beam(width=3, length_penalty=0.0, coverage_penalty=BETA), Padded.from_rows([[4, 5], [6]])
    found = search(model, batch, strategy, max_lengths=longest(batch), prefix=prefix)
    rows = [line[0] for line in found]
    expected = brute_force_ranks(model, batch, rows, 0.0, BETA)
    scores = score(model, with_targets(batch, [one.ids for one in rows]))
    forced = [sum(scores[0][:2]), sum(scores[1][:1])]  # a prefix is not scored
    assert [one.rank for one in rows] == pytest.approx(
        [rank - given for rank, given in zip(expected, forced, strict=True)], abs=2e-3
    )


def test_lowered_decoders_and_ensembles_of_one_give_the_same():
    model, batch, strategy = shared(TRANSFORMER), example_batch([(5, 4), (2, 6)]), Beam(width=3, coverage_penalty=BETA)
    found = search(model, batch, strategy, max_lengths=longest(batch))
    for other in (lower_network(model, "fp32"), Ensemble([model])):
        same = search(other, batch, strategy, max_lengths=longest(batch))
        for line, again in zip(found, same, strict=True):
            assert [one.ids for one in again] == [one.ids for one in line]
            assert [one.rank for one in again] == pytest.approx([one.rank for one in line], abs=1e-3)


def test_sources_that_enter_later_have_their_own_coverage():
    model, batch = shared("recurrent>recurrent"), example_batch([(5, 4), (5, 6), (5, 1), (5, 3)])
    strategy = Beam(width=3, coverage_penalty=BETA)
    together = search(model, batch, strategy, max_lengths=longest(batch))
    requests = [SearchRequest(batch.select(torch.tensor([row])), longest(batch)[:1]) for row in range(batch.size)]
    for line, again in zip(together, continuous_search(model, requests, strategy, slots=2), strict=True):
        assert [one.ids for one in again] == [one.ids for one in line]


NO_ATTENTION = ["alone>transformer", "alone>recurrent", "recurrent,cell=gru>recurrent,cell=gru,context=initial"]


@pytest.mark.parametrize("case", NO_ATTENTION)
def test_a_decoder_without_attention_is_refused(case):
    batch = example_batch([(5, 4)])
    with pytest.raises(InputError, match="coverage_penalty needs a decoder that attends"):
        search(shared(case), batch, Beam(coverage_penalty=0.2), max_lengths=longest(batch))


def test_a_recipe_without_attention_is_refused_before_training():
    recipe = {
        "data": {"train": [{"path": "a.tsv"}]},
        "model": {"encoder": {"kind": "recurrent"}, "decoder": {"kind": "recurrent", "context": "initial"}},
        "generation": {"coverage_penalty": 0.2},
    }
    with pytest.raises(InputError, match="coverage_penalty needs a decoder that attends"):
        complete_recipe(parse(recipe))
