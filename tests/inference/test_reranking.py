"""Minimum Bayes risk against brute force, diverse beams, min-p, noisy-channel reranking."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from contract_fixtures import example_batch, shared
from export_fixtures import TEXTS, make_run, pair, transformer
from sacrebleu.metrics import BLEU, CHRF

import transduce
from transduce.decoding.search import search
from transduce.decoding.strategies import Beam, DiverseBeam, Sample
from transduce.errors import InputError
from transduce.inference.reranking import (
    character_ngrams,
    chrf,
    expected_utilities,
    rank_by_utility,
    rerank_noisy_channel,
)


def random_texts(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choice(["haus", "der", "katze", "ß", "is"]) for _ in range(draw.randint(0, 6)))
        for _ in range(count)
    ]


@pytest.mark.parametrize(("utility", "scorer"), [("chrf", CHRF()), ("bleu", BLEU(effective_order=True, force=True))])
def test_minimum_bayes_risk_picks_the_argmax_by_brute_force(utility, scorer):
    for seed in range(4):
        candidates = random_texts(9, seed)
        brute = [np.mean([scorer.sentence_score(one, [other]).score for other in candidates]) for one in candidates]
        assert expected_utilities(candidates, utility) == pytest.approx(brute)
        assert brute[rank_by_utility(candidates, utility)[0]] == pytest.approx(max(brute))


def test_chrf_of_sentences_is_that_of_sacrebleu():
    one, other = random_texts(40, 5), random_texts(40, 6)
    expected = [CHRF().sentence_score(a, [b]).score for a, b in zip(one, other, strict=True)]
    assert [chrf(character_ngrams(a), character_ngrams(b)) for a, b in zip(one, other, strict=True)] == pytest.approx(
        expected
    )


def test_aggregate_references_are_exact_for_equal_references():
    candidates = ["der haus"] * 3
    assert expected_utilities(candidates, "chrf", aggregate=True) == pytest.approx([100.0] * 3)
    near = ["das haus ist rot", "das haus ist rot", "das haus ist blau", "ein zebra"]
    assert rank_by_utility(near, "chrf", aggregate=True)[0] == rank_by_utility(near, "chrf")[0] == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> transduce.Model:
    folder = tmp_path_factory.mktemp("mbr") / "run"
    make_run(folder, pair())
    return transduce.load(folder)


@pytest.mark.parametrize("utility", ["chrf", "bleu"])
def test_a_model_returns_the_sample_of_least_risk(model, utility):
    samples = model.generate(TEXTS, strategy="sample", beam=6, nbest=6)
    found = model.generate(TEXTS, strategy={"kind": "mbr", "utility": utility}, beam=6)
    for one, several in zip(found, samples, strict=True):
        texts = [rival.text for rival in several.nbest]
        assert one.text == texts[rank_by_utility(texts, utility)[0]]


def test_minimum_bayes_risk_has_many_samples_by_default(model):
    assert model.settings(strategy="mbr").beam == 32
    assert len(model.generate(TEXTS[:1], strategy="mbr", nbest=3)[0].nbest) == 3


def groups_by_hand(totals, scores, groups, diversity):
    """One selection of a source by nested loops."""
    size, taken, rows = len(totals) // groups, {}, []
    for group in range(groups):
        options = [
            (totals[row] + scores[row][token] - diversity * taken.get(token, 0), row, token)
            for row in range(group * size, (group + 1) * size)
            for token in range(len(scores[row]))
        ]
        chosen = sorted(options, reverse=True)[:size]
        for _, _, token in chosen:
            taken[token] = taken.get(token, 0) + 1
        rows += [(row, token) for _, row, token in chosen]
    return rows


def test_groups_of_a_diverse_beam_are_those_of_nested_loops():
    torch.manual_seed(2)
    totals, scores = torch.randn(3, 6), torch.randn(3, 6, 9)
    found = DiverseBeam(width=6, groups=3, diversity=0.7).select(totals, scores, None)
    for source in range(3):
        expected = groups_by_hand(totals[source].tolist(), scores[source].tolist(), 3, 0.7)
        assert list(zip(found.parents[source].tolist(), found.tokens[source].tolist(), strict=True)) == expected
        sums = [float(totals[source, row] + scores[source, row, token]) for row, token in expected]
        assert found.totals[source].tolist() == pytest.approx(sums)


def test_a_diverse_beam_of_one_group_is_a_beam_and_groups_differ():
    model, batch = shared("transformer>transformer"), example_batch([(5, 4), (2, 6), (7, 1)])
    lengths = torch.full((3,), 7)
    plain = search(model, batch, Beam(width=4), max_lengths=lengths)
    one = search(model, batch, DiverseBeam(width=4, groups=1), max_lengths=lengths)
    assert [[row.ids for row in line] for line in one] == [[row.ids for row in line] for line in plain]
    several = search(model, batch, DiverseBeam(width=4, groups=4, diversity=50.0), max_lengths=lengths)
    assert all(len({row.ids[0] for row in line}) == 4 for line in several)
    with pytest.raises(InputError, match="5 cannot be divided into 2 groups"):
        DiverseBeam(width=5, groups=2)


def test_min_p_leaves_tokens_near_the_best_one():
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(1, 1, 4)
    draws = torch.linspace(0, 0.999, 50)
    for min_p, expected in ((0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.4, {0, 1}), (1.0, {0})):
        strategy = Sample(min_p=min_p)
        found = {int(strategy.select(torch.zeros(1, 1), scores, draw.view(1, 1)).tokens) for draw in draws}
        assert found == expected


def test_the_noisy_channel_sorts_by_the_sum_of_its_scores(model, tmp_path):
    make_run(tmp_path / "reverse", pair(), seed=9)
    make_run(tmp_path / "lm", {"decoder": transformer()}, seed=4)
    reverse, language_model = transduce.load(tmp_path / "reverse"), transduce.load(tmp_path / "lm")
    texts = TEXTS[:3]
    plain = model.generate(texts, nbest=4, min_length=3)  # no empty hypothesis, which has no reverse score
    found = rerank_noisy_channel(plain, reverse=reverse, language_model=language_model, weights=(0.5, 0.25))
    assert all(rival.text for one in plain for rival in one.nbest)
    assert len(found) == len(plain) == len(texts)
    for before, after in zip(plain, found, strict=True):

        def total(one):
            back, alone = reverse.score([(one.text, one.source)])[0], language_model.score([("", one.text)])[0]
            parts = [(one, 1.0), (back, 0.5), (alone, 0.25)]
            return sum(weight * part.score / len(part.token_scores) for part, weight in parts)

        ranked = sorted(before.nbest, key=total, reverse=True)
        assert [one.text for one in after.nbest] == [one.text for one in ranked]
        assert after.text == ranked[0].text
    with pytest.raises(InputError, match="not a language model"):
        rerank_noisy_channel(plain, language_model=reverse)


def test_generate_reranks_by_the_noisy_channel(attention_run, command):
    options = ("--reverse", attention_run, "--channel-weights", "1,0", "--beam", "3")
    called = command("generate", attention_run, "-", *options, stdin=b"red blue\n\ngreen\n")
    assert called.code == 0, called.err
    assert len(called.out.splitlines()) == 3
    called = command("generate", attention_run, "-", *options, "--nbest", "2", stdin=b"red blue\n")
    assert [line.split(" ||| ")[0] for line in called.out.splitlines()] == ["0", "0"]
    called = command("generate", attention_run, "-", "--channel-weights", "1", "--reverse", attention_run, stdin=b"a\n")
    assert (called.code, "--channel-weights" in called.err) == (2, True)
