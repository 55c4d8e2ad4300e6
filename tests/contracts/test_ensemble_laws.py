"""Ensembles of different architectures obey the laws of a single model."""

from __future__ import annotations

import itertools

import pytest
import test_model_laws as model_laws
import test_search_laws as search_laws
import torch
from contract_fixtures import SIZE, example_batch, make, read
from torch.testing import assert_close

from transduce.decoding.logits_processors import SuppressTokens
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, Greedy
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.inference.ensemble import Combination, Ensemble
from transduce.kernels.cuda_graph import SearchGraphs

MEMBERS = {
    "recurrent, transformer": ("recurrent>recurrent", "transformer>transformer"),
    "convolutional, hard attention, decoder alone": (
        "convolutional>convolutional",
        "recurrent>hard_attention",
        "alone>transformer",
    ),
}
LAWS = (
    model_laws.test_whole_sequence_equals_stepwise,
    model_laws.test_advance_in_pieces_equals_whole_sequence,
    model_laws.test_logits_do_not_depend_on_later_tokens,
    model_laws.test_logits_do_not_depend_on_padding,
    model_laws.test_logits_do_not_depend_on_the_batch,
    model_laws.test_beams_share_the_fixed_state,
)


@pytest.fixture(params=["mean", "log_linear"])
def combination(request: pytest.FixtureRequest) -> Combination:
    return request.param


@pytest.fixture(params=list(MEMBERS))
def ensemble(request: pytest.FixtureRequest, combination: Combination) -> Ensemble:
    return Ensemble([make(name) for name in MEMBERS[request.param]], combination)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("test_"))
def test_ensembles_keep_the_laws_of_models(law, ensemble, batch):
    law(ensemble, batch, read(ensemble, batch))


@pytest.mark.parametrize("strategy", search_laws.STRATEGIES, ids=lambda s: type(s).__name__)
def test_scores_add_up_and_greedy_is_greedy(ensemble, batch, strategy):
    lengths = search_laws.longest(batch)
    found = search(ensemble, batch, strategy, max_lengths=lengths, seeds=search_laws.SEEDS)
    search_laws.check_scores(ensemble, batch, found)
    if isinstance(strategy, Greedy):
        search_laws.check_greedy(ensemble, batch, found)


def test_probabilities_are_the_mean_of_those_of_the_members(batch):
    members = [make(name) for name in MEMBERS["recurrent, transformer"]]
    probabilities = torch.stack([member(batch).logits.softmax(-1) for member in members])
    assert_close(Ensemble(members)(batch).logits.exp(), probabilities.mean(0))
    product = probabilities.prod(0).sqrt()
    expected = product / product.sum(-1, keepdim=True)
    assert_close(Ensemble(members, "log_linear")(batch).logits.exp(), expected)


def test_an_ensemble_of_one_is_the_model(model, batch):
    expected = model(batch).logits.log_softmax(-1)
    for combination in ("mean", "log_linear"):
        assert_close(Ensemble([model], combination)(batch).logits, expected)


def test_members_in_any_order_give_the_same(ensemble, combination, batch):
    shares = [3.0, 1.0, 2.0][: len(ensemble.members)]
    first = Ensemble(list(ensemble.members), combination, weights=shares)
    turned = Ensemble(list(ensemble.members)[::-1], combination, weights=shares[::-1])
    assert_close(turned(batch).logits, first(batch).logits)
    lengths = search_laws.longest(batch)
    found = [search(one, batch, Beam(width=3, length_penalty=1.0), max_lengths=lengths) for one in (first, turned)]
    assert [line[0].ids for line in found[0]] == [line[0].ids for line in found[1]]


def test_weights_are_a_member_repeated(batch, combination):
    one, other = (make(name) for name in MEMBERS["recurrent, transformer"])
    weighted = Ensemble([one, other], combination, weights=[2, 1])
    assert_close(weighted(batch).logits, Ensemble([one, one, other], combination)(batch).logits)


def test_search_finds_the_best_of_all_sequences(combination):
    """Brute force: every sequence is scored by each member alone, and the token distributions are combined here."""
    members, shares = [make(name) for name in MEMBERS["recurrent, transformer"]], torch.tensor([0.75, 0.25])
    batch, words, most = example_batch([(3, 2), (5, 2)]), [4, 5, 6], 3
    banned = [SuppressTokens(tokens=[token for token in range(SIZE) if token not in (*words, EOS)])]
    space = [(*ids, EOS) for length in range(most) for ids in itertools.product(words, repeat=length)]
    found = search(
        Ensemble(members, combination, weights=shares.tolist()),
        batch,
        Beam(width=60, length_penalty=0.0),
        max_lengths=search_laws.longest(batch, most),
        processors=banned,
    )
    for row in range(batch.size):
        every = batch.select(torch.full((len(space),), row))
        target = Padded.from_rows([[BOS, *ids] for ids in space])
        alone = [one(Batch(every.source, target)).logits.softmax(-1).double() for one in members]
        stacked = torch.stack(alone)  # M R T V
        if combination == "mean":
            mixed = (stacked * shares[:, None, None, None]).sum(0)
        else:
            mixed = (stacked ** shares[:, None, None, None].double()).prod(0)
            mixed = mixed / mixed.sum(-1, keepdim=True)
        scored = {
            ids: sum(mixed[i, t, token].log().item() for t, token in enumerate(ids)) for i, ids in enumerate(space)
        }
        complete = [one for one in found[row] if one.complete]
        assert len(complete) == len(space)
        assert [one.score for one in complete] == pytest.approx(sorted(scored.values(), reverse=True), abs=1e-3)
        assert complete[0].score == pytest.approx(scored[complete[0].ids], abs=1e-3)


def test_attention_is_the_mean_of_members_layers_and_heads(batch):
    members = [make(name) for name in MEMBERS["recurrent, transformer"]]
    weights = Ensemble(members)(batch, with_attention=True).attention.cross
    each = [member(batch, with_attention=True).attention.cross.mean((1, 2)) for member in members]
    assert_close(weights[:, 0, 0], torch.stack(each).mean(0))


def test_a_captured_search_finds_the_same(ensemble: Ensemble, batch: Batch, replayed: SearchGraphs):
    lengths = search_laws.longest(batch)
    strategy = Beam(width=3, length_penalty=1.0)
    plain = search(ensemble, batch, strategy, max_lengths=lengths)
    captured = search(ensemble, batch, strategy, max_lengths=lengths, graphs=replayed)
    assert [one[0].ids for one in captured] == [one[0].ids for one in plain]
