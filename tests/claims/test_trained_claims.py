"""Parts of the claims that need trained models, on hardly trained ones; the directions are in the records."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transduce.evaluation.claims import CLAIMS, bottleneck, context, self_attention, training
from transduce.evaluation.claims.claim import (
    ATTENTION,
    LAYERS,
    ONE_VECTOR,
    Budget,
    Validation,
    encode_pairs,
    recipe,
    scaled,
    seconds_per_update,
    untrained,
)
from transduce.evaluation.evaluate import LengthBucket
from transduce.evaluation.significance import ConfidenceInterval, PairedTestResult
from transduce.flow import Example
from transduce.inference import Model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A Transformer of two layers on sentences with pronouns, after two updates."""
    budget = Budget(tmp_path_factory.mktemp("claims"))
    pairs = budget.write_pairs("pairs", context.pronoun_examples(300, 1, held_out=False))
    data = {"train": pairs, "dev": pairs, "cache": str(budget.folder / "cache")}
    return budget.train("tiny", recipe(data, {"encoder": LAYERS, "decoder": {**LAYERS, "layers": 1}}, 2))


def test_the_last_word_decides_what_a_pronoun_refers_to() -> None:
    sentence = context.PronounSentence("dog", "street", "tired")
    assert sentence.text == "the dog did not cross the street because it was too tired"
    assert sentence.referent == "dog"
    assert replace(sentence, word="wide").referent == "street"
    train, test = ({one.source for one in context.pronoun_examples(500, 1, held_out=held)} for held in (False, True))
    assert not train & test


@pytest.mark.slow
def test_a_word_is_one_vector_before_the_first_layer_and_several_after_it(model: Model) -> None:
    texts = [context.PronounSentence("dog", "street", word).text for word in ("tired", "hungry", "wide")]
    states = context.pronoun_states(model, texts)
    assert len(states) == 3
    assert torch.allclose(states[0][0], states[0][2], atol=1e-6)
    assert float(context.cosine_distances(states[2][:1], states[2][2:])) > 1e-6
    assert len(context.transformer_encoder(model).layers) == 2  # all layers are back
    distances = context.context_distances(model, 6)
    assert distances["same referent"][0] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_pruned_head_changes_the_output_and_comes_back(model: Model) -> None:
    chosen = list(islice(context.pronoun_sentences(3, held_out=True), 20))
    batch = encode_pairs(model, [Example(one.text, one.referent) for one in chosen])
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    costs = self_attention.pruning_costs(model, batch)
    assert len(costs) == 2 * 4 + 4 + 4
    assert all(cost != 0 for name, (cost, _) in costs.items() if name.startswith(("encoder", "decoder 0 cross")))
    after = model.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_patterns_of_a_uniform_head_are_those_of_the_baseline() -> None:
    sentence = context.PronounSentence("dog", "street", "tired")
    words = [*sentence.text.split(), "</s>"]
    size, rare = len(words), {"dog", "tired"}
    weights = np.full((1, 1, size, size), 1 / size)
    found, base = self_attention.patterns(weights, words, sentence, rare), self_attention.uniform(words, rare)
    assert {name: float(values[0, 0]) for name, values in found.items()} == pytest.approx(base)
    weights[:] = np.eye(size)
    found = self_attention.patterns(weights, words, sentence, rare)
    assert found["itself"] == 1
    assert found["previous word"] == found["it to its noun"] == 0


def test_the_nearest_neighbour_is_the_paraphrase_where_vectors_are_close() -> None:
    vectors = np.random.default_rng(1).normal(size=(20, 8))
    noise = 0.1 * np.random.default_rng(2).normal(size=(20, 8))
    assert context.nearest_is_paraphrase(np.concatenate([vectors, vectors + noise]), 20) > 0.9
    assert context.nearest_is_paraphrase(context.word_counts(["a b", "c d", "e f", "g h"]), 2) <= 0.5


def test_meanings_of_the_context_vector_differ_in_their_roles_alone() -> None:
    meaning = bottleneck.Meaning("anna", "sees", "ben")
    assert (meaning.active, meaning.passive) == ("anna sees ben", "ben is seen by anna")
    assert sorted(meaning.exchanged.active.split()) == sorted(meaning.active.split())
    assert {one.target for one in meaning.examples()} == {"sees anna ben"}
    train, test = ({frozenset((one.agent, one.patient)) for one in part} for part in bottleneck.meanings(1))
    assert not train & test
    assert len(train) + len(test) == 28


def test_the_passive_is_closer_where_vectors_hold_the_roles() -> None:
    active, passive, exchanged = np.eye(3), np.eye(3) * 0.9, -np.eye(3)
    rows = np.stack((active, passive, exchanged), 1).reshape(9, 3)
    assert bottleneck.voice_closer_than_words(rows) == 1
    swapped = np.stack((active, exchanged, passive), 1).reshape(9, 3)
    assert bottleneck.voice_closer_than_words(swapped) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_last_state_favours_the_recent_past_and_attention_does_not(seed: int) -> None:
    curves = {
        name: bottleneck.influence(untrained(spec, seed), bottleneck._sources(seed, 30), 30, read)
        for name, (spec, read) in bottleneck.readers().items()
    }
    assert all(check.holds for check in bottleneck.recency_checks("untrained", curves))
    flat = {name: [1.0] * bottleneck.LENGTH for name in curves}
    assert [check.holds for check in bottleneck.recency_checks("flat", flat)] == [False, True]


def test_models_of_the_bottleneck_have_equal_parameters() -> None:
    like = untrained(scaled(ATTENTION, 64), 1)
    parameters = sum(one.numel() for one in like.parameters())
    sizes = SimpleNamespace(size=30)
    matched = bottleneck.equal_parameters(
        scaled(ONE_VECTOR, 64),
        SimpleNamespace(parameters=parameters, source=sizes, target=sizes),  # type: ignore[arg-type]
    )
    other = sum(one.numel() for one in untrained(matched, 1).parameters())
    assert abs(other / parameters - 1) < 0.05


def test_the_bottleneck_is_a_significant_difference_that_grows() -> None:
    def system(scores: list[float]) -> bottleneck.ScoredSystem:
        buckets = [LengthBucket(i, i, 9, ConfidenceInterval(score, score, score)) for i, score in enumerate(scores)]
        return bottleneck.ScoredSystem(1, np.zeros((1, 1)), float(np.mean(scores)), buckets)

    systems = {"attention": system([99.0, 98.0, 97.0, 96.0])}
    systems["one vector, equal parameters"] = system([99.0, 97.0, 50.0, 5.0])
    task = bottleneck.LengthTask("reversal", {}, [], {}, "exact", 1)
    result = PairedTestResult(30.0, 25.0, 35.0, 0.001)
    assert [check.holds for check in bottleneck._checks(task, systems, result)] == [True, True]
    assert not bottleneck._checks(task, systems, replace(result, p_value=0.2))[0].holds
    assert not bottleneck._checks(task, systems, replace(result, difference=-30.0))[0].holds


@pytest.mark.slow
def test_running_sums_and_their_positions(tmp_path: Path) -> None:
    examples = list(islice(training.running_sums(1), 20))
    for one in examples:
        digits, totals = one.source.split(), (one.target or "").split()
        assert totals[-1] == str(sum(map(int, digits)) % training.BASE)
    budget = Budget(tmp_path)
    pairs = budget.write_pairs("sums", examples * 4)
    data = {"train": pairs, "dev": pairs, "cache": str(tmp_path / "cache")}
    model = budget.train("sums", recipe(data, scaled(ATTENTION, 16), 2))
    found = training.by_position(model, examples)
    # The first token has no prefix: what is right after the reference is right alone.
    assert found["after reference"][0] == found["after own"][0]
    assert len(found["after own"]) == max(len((one.target or "").split()) for one in examples)


def test_the_gap_is_the_difference_of_both_curves() -> None:
    early, late = np.array([1.0, 1.0]), np.array([0.9, 0.5])
    found = {name: {"after reference": early, "after own": late} for name in training.REMEDIES}
    measured = training._measurement(found)
    assert measured.holds
    assert measured.checks[0].numbers["gap"] == pytest.approx(0.3)


def test_the_time_of_an_update_is_that_of_an_undisturbed_machine() -> None:
    seconds = [0.0, 1.0, 2.0, 9.0, 10.0, 11.0]
    entries = [{"kind": "update", "step": 10 * number, "seconds": one} for number, one in enumerate(seconds, start=1)]
    assert seconds_per_update(entries) == pytest.approx(0.1)
    entries.insert(3, {"kind": "validation", "step": 30})
    assert seconds_per_update(entries) == pytest.approx(0.1)


def test_what_was_reached_within_a_budget_of_time() -> None:
    history = [Validation(step, step / 10, {"exact": step, "loss": 1.0}) for step in (25, 50, 75)]
    assert [training.reached(history, seconds).step for seconds in (1, 5, 6, 100)] == [25, 50, 50, 75]


def test_pairs_of_the_user_are_split_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_text("".join(f"source {number}\ttarget {number}\n" for number in range(200)))
    task = bottleneck._own_pairs(Budget(tmp_path / "claims", data=path))
    parts = {name: Path(task.data[name]).read_text().splitlines() for name in ("train", "dev")}
    parts["test"] = [f"{one.source}\t{one.target}" for one in task.test]
    assert {name: len(lines) for name, lines in parts.items()} == {"train": 180, "dev": 10, "test": 10}
    assert len(set().union(*parts.values())) == 200


def test_no_sentence_of_the_test_of_translations_is_in_training(tmp_path: Path) -> None:
    task = bottleneck._translations(Budget(tmp_path), {})
    trained = {line.partition("\t")[0] for line in Path(task.data["train"]).read_text().splitlines()}
    assert len(task.test) == 500
    assert not trained & {one.source for one in task.test}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that claims about the same model train it once."""
    return tmp_path_factory.mktemp("measured")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context-vector", "map", "context", "heads"])
def test_short_trainings_show_the_direction_of_the_claim(name: str, measured: Path) -> None:
    found = CLAIMS[name].measure(Budget(measured))
    assert {check.statement: check.numbers for check in found.checks if not check.holds} == {}


@pytest.mark.slow
def test_a_model_of_the_user_is_measured_beside_the_one_trained_here(measured: Path) -> None:
    context.pronoun_resolver(Budget(measured))
    found = context.measure_context(Budget(measured, model=str(Budget(measured).run("pronouns").folder)))
    rows = {
        model: [row[1:] for row in found.tables[0].rows if row[0] == model] for model in ("trained here", "imported")
    }
    assert rows["trained here"] == rows["imported"]
    assert len(found.panels) == 2
