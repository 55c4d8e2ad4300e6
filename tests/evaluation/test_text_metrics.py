"""Text metrics against sacrebleu and jiwer; additivity of their statistics."""

import random
from functools import partial

import jiwer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF, TER

from transduce.contracts import Metric, ScoreMetric, TextMetric
from transduce.errors import InputError
from transduce.evaluation.evaluate import METRICS, find_metric

# Metrics with a model of their own: test_learned_metrics.py.
LEARNED = ("spbleu", "bertscore", "comet")
OF_TEXTS = [name for name, kind in METRICS.items() if issubclass(kind, TextMetric) and name not in LEARNED]
SACRE = {"bleu": BLEU, "chrf": CHRF, "chrf++": partial(CHRF, word_order=2), "ter": TER}
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    ",",
    ".",
    "Straße",
    "日本",
    "naïve",
    "it's",
    "3.14",
    "(yes)",
    "über",
]


def corpus(seed: int, lines: int = 40, most: int = 3) -> tuple[list[str], list[list[str]]]:
    """References, and hypotheses that are damaged copies of one of them."""
    draw = random.Random(seed)
    references, hypotheses = [], []
    for _ in range(lines):
        options = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(draw.randint(1, most))]
        words = [w if draw.random() > 0.2 else draw.choice(WORDS) for w in options[0].split() if draw.random() > 0.1]
        references.append(options)
        hypotheses.append(" ".join(words))
    return hypotheses, references


def streams(references: list[list[str]]) -> list[list[str | None]]:
    most = max(map(len, references))
    return [[line[i] if i < len(line) else None for line in references] for i in range(most)]


def total(metric: Metric, hypotheses: list[str], references: list[list[str]]) -> float:
    return metric.value(metric.statistics(hypotheses, references).sum(0))


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SACRE)
def test_corpus_score_equals_that_of_sacrebleu(name: str, seed: int, most: int) -> None:
    hypotheses, references = corpus(seed, most=most)
    metric, oracle = find_metric(name), SACRE[name]()
    expected = oracle.corpus_score(hypotheses, streams(references)).score
    assert total(metric, hypotheses, references) == pytest.approx(expected, abs=1e-9)
    assert metric.signature == str(oracle.get_signature())


@pytest.mark.parametrize("name", SACRE)
def test_edge_cases_are_scored_as_by_sacrebleu(name: str) -> None:
    for hypotheses, references in [
        (["", ""], [["a b"], ["c"]]),
        (["a"], [["a"]]),  # shorter than every order of BLEU but the first
        (["x y z"], [["a b c d e"]]),
        (["a b", "c d"], [[""], ["c d"]]),
        ([""], [[""]]),
    ]:
        expected = SACRE[name]().corpus_score(hypotheses, streams(references)).score
        assert total(find_metric(name), hypotheses, references) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", SACRE)
def test_signature_has_the_number_of_references(name: str) -> None:
    metric = find_metric(name)
    assert "nrefs:1|" in metric.signature
    metric.statistics(["a", "b"], [["a", "c"], ["b", "d"]])
    assert "nrefs:2|" in metric.signature
    metric.statistics(["a", "b"], [["a", "c"], ["b"]])
    assert "nrefs:var|" in metric.signature


# The columns of macro_f1 follow the labels; how rare words are, for cider, follows from all lines.
@pytest.mark.parametrize("name", [name for name in OF_TEXTS if name not in ("macro_f1", "cider")])
def test_statistics_of_a_subset_are_a_subset_of_the_statistics(name: str) -> None:
    hypotheses, references = corpus(7)
    metric = find_metric(name)
    rows = metric.statistics(hypotheses, references)
    chosen = [0, 3, 3, 9, 20, 39]  # a resample: one line twice
    alone = METRICS[name]().statistics([hypotheses[i] for i in chosen], [references[i] for i in chosen])
    np.testing.assert_array_equal(rows[chosen], alone)
    assert METRICS[name]().statistics([], []).shape == (0, rows.shape[1])


# ROUGE sees nothing in another script, and no pair in one word: what a perfect output is, test_overlap.py says. What
# cider gives to a perfect output follows from the set: test_consensus.py.
@pytest.mark.parametrize("name", [name for name in OF_TEXTS if not name.startswith("rouge") and name != "cider"])
def test_perfect_output_has_the_best_score(name: str) -> None:
    _, references = corpus(3)
    first = [line[-1] for line in references]
    metric = find_metric(name)
    if name == "ter":  # the mean reference length stands below, the best reference above
        assert total(metric, first, references) == 0
    else:
        assert total(metric, first, references) == pytest.approx(100 if metric.higher_is_better else 0)
    assert metric.perfect == (100 if metric.higher_is_better else 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.lists(st.sampled_from("ab c"), max_size=6).map("".join)] * 2), min_size=1, max_size=6))
def test_error_rates_equal_those_of_jiwer(pairs: list[tuple[str, str]]) -> None:
    pairs = [(h, r) for h, r in pairs if r.strip()]
    if not pairs:
        return
    hypotheses, references = [h for h, _ in pairs], [r for _, r in pairs]
    expected = {"wer": jiwer.wer(references, hypotheses), "cer": jiwer.cer(references, hypotheses)}
    for name, value in expected.items():
        assert total(find_metric(name), hypotheses, [[r] for r in references]) == pytest.approx(100 * value, abs=1e-9)


def test_error_rate_uses_the_closest_reference() -> None:
    assert find_metric("wer").statistics(["a b c"], [["x y z", "a b", "a b c d"]]).tolist() == [[1, 4]]
    assert find_metric("per").statistics(["K AE1 T"], [["K AE1 D"]]).tolist() == [[1, 3]]
    assert find_metric("cer").statistics(["kitten"], [["sitting"]]).tolist() == [[3, 7]]


def test_error_rate_of_empty_references() -> None:
    assert total(find_metric("wer"), [""], [[""]]) == 0
    assert total(find_metric("wer"), ["a"], [[""]]) == 100
    assert total(find_metric("wer"), ["a b c d"], [["a"]]) == 300  # more than everything can be wrong


def test_exact_match() -> None:
    metric = find_metric("exact")
    assert total(metric, ["a", "b", "c ", "d"], [["a"], ["x", "b"], ["c"], ["D"]]) == 50


def test_a_string_is_a_single_reference() -> None:
    for name in OF_TEXTS:
        metric = find_metric(name)
        np.testing.assert_array_equal(
            metric.statistics(["the cat"], ["the dog"]), metric.statistics(["the cat"], [["the dog"]])
        )


@pytest.mark.parametrize("name", OF_TEXTS)
def test_invalid_input_is_named(name: str) -> None:
    with pytest.raises(InputError, match="2 hypotheses but 1 lines"):
        find_metric(name).statistics(["a", "b"], [["a"]])
    with pytest.raises(InputError, match="line 2 has no reference"):
        find_metric(name).statistics(["a", "b"], [["a"], []])


def test_the_metric_registry() -> None:
    for name, kind in METRICS.items():
        assert kind().name == name
        assert kind.__doc__
        lower = name in {"ter", "wer", "cer", "per", "ser"} or issubclass(kind, ScoreMetric)
        assert METRICS[name]().higher_is_better == (not lower)
    with pytest.raises(InputError, match="did you mean 'chrf'"):
        find_metric("chrff")


class TestLabels:
    """Accuracy, counted again by hand."""

    def test_accuracy_of_tags_and_of_single_labels(self) -> None:
        metric = find_metric("accuracy")
        rows = metric.statistics(["A B C", "A", ""], [["A X C"], ["B"], ["A A"]])
        assert rows.tolist() == [[2, 3], [0, 1], [0, 2]]
        assert metric.value(rows.sum(0)) == pytest.approx(100 * 2 / 6)
