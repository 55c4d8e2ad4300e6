"""Overlap metrics against rouge_score, scikit-learn and seqeval."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.contracts import Metric
from transduce.evaluation.evaluate import METRICS, find_metric
from transduce.evaluation.overlap_metrics import is_bio, spans

ROUGE = ["rouge1", "rouge2", "rougeL"]
NAMES = [*ROUGE, "token_f1", "macro_f1", "span_f1"]
texts = st.lists(
    st.sampled_from(["the", "a", "The", "cat", "don't", "3.5", "Straße", "日本", "x-y", ",", "  "]), max_size=9
)
lines = st.lists(st.tuples(texts.map(" ".join), st.lists(texts.map(" ".join), min_size=1, max_size=3)), min_size=1)
labels = st.sampled_from(["yes", "no", "perhaps so", "other"])
tags = st.sampled_from(["O", *(f"{mark}-{kind}" for mark in "BIES" for kind in ("PER", "LOC"))])


def total(metric: Metric, hypotheses: list[str], references: list[list[str]]) -> float:
    return metric.value(metric.statistics(hypotheses, references).sum(0))


@settings(max_examples=80, deadline=None)
@given(lines)
def test_rouge_equals_that_of_rouge_score(pairs: list[tuple[str, list[str]]]) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    oracle = RougeScorer(ROUGE)
    for name in ROUGE:
        expected = [oracle.score_multi(references, said)[name].fmeasure for said, references in pairs]
        found = total(find_metric(name), [said for said, _ in pairs], [references for _, references in pairs])
        assert found == pytest.approx(100 * np.mean(expected), abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(labels, labels), min_size=1, max_size=20))
def test_macro_f1_equals_that_of_sklearn(pairs: list[tuple[str, str]]) -> None:
    from sklearn.metrics import f1_score as sklearn_f1

    said, gold = [list(side) for side in zip(*pairs, strict=True)]
    wanted = 100 * sklearn_f1(gold, said, labels=sorted(set(gold)), average="macro", zero_division=0)
    assert total(find_metric("macro_f1"), said, [[label] for label in gold]) == pytest.approx(wanted)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.tuples(tags, tags), min_size=1, max_size=9), min_size=1, max_size=5))
def test_span_f1_equals_that_of_seqeval(pairs: list[list[tuple[str, str]]]) -> None:
    from seqeval.metrics import f1_score as seqeval_f1

    said, gold = ([[pair[side] for pair in line] for line in pairs] for side in (0, 1))
    found = total(find_metric("span_f1"), [" ".join(line) for line in said], [[" ".join(line)] for line in gold])
    if any(spans(line) for line in [*said, *gold]):
        assert found == pytest.approx(100 * seqeval_f1(gold, said, zero_division=0))
    else:
        assert found == 100  # seqeval says 0 where there is nothing to find and nothing was found


def test_spans_of_tag_sequences() -> None:
    assert spans(["B-A", "I-A", "O", "I-A", "I-B", "B-B"]) == [("A", 0, 1), ("A", 3, 3), ("B", 4, 4), ("B", 5, 5)]
    assert spans(["B-A", "I-A", "E-A", "E-A", "S-A", "I-A"]) == [("A", 0, 2), ("A", 3, 3), ("A", 4, 4), ("A", 5, 5)]
    assert spans(["B-A", "L-A", "U-A", "O"]) == [("A", 0, 1), ("A", 2, 2)]
    assert spans(["NN", "VB", "O"]) == []


def test_bio_tags_are_recognised() -> None:
    assert is_bio(["O", "B-PER", "I-PER"])
    assert is_bio(["S-LOC"])
    assert not is_bio(["O", "O"])
    assert not is_bio(["B-PER", "NN"])
    assert not is_bio(["I", "B"])


def test_token_f1_normalises_answers_as_squad_does() -> None:
    metric = find_metric("token_f1")
    assert total(metric, ["The Eiffel Tower!"], [["eiffel tower"]]) == 100
    assert total(metric, ["in Paris"], [["Rome", "Paris"]]) == pytest.approx(100 * 2 / 3)  # precision 1/2, recall 1
    assert total(metric, ["the", "x"], [[""], ["the"]]) == 50  # an article alone is no answer
    assert total(metric, ["a a b"], [["b b"]]) == pytest.approx(100 * 2 / 3)  # `a` is an article


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 12))
def test_sentence_metrics_are_means_over_lines(name: str, seed: int, count: int) -> None:
    """Perfect outputs score 100; order does not matter; any resample is scored as if it had come alone."""
    draw = random.Random(seed)
    pool = ["B-A I-A O", "O B-B", "the cat sat", "cat on mat", "dog"]
    gold = [[draw.choice(pool) for _ in range(draw.randint(1, 2))] for _ in range(count)]
    said = [draw.choice([*pool, "something else"]) for _ in range(count)]
    metric = find_metric(name)
    if name != "rouge2":  # of a single word it knows nothing
        assert total(metric, [line[-1] for line in gold], gold) == pytest.approx(100)
    assert 0 <= total(metric, said, gold) <= 100
    chosen = draw.choices(range(count), k=count)
    alone = total(METRICS[name](), [said[i] for i in chosen], [gold[i] for i in chosen])
    rows = metric.statistics(said, gold)
    assert metric.value(rows[chosen].sum(0)) == pytest.approx(alone)
    assert metric.value(rows[chosen[::-1]].sum(0)) == pytest.approx(alone)


def test_rouge_signature_states_its_tokenisation() -> None:
    assert "stem:no" in find_metric("rougeL").signature
    assert total(find_metric("rouge2"), ["the cat sat"], [["The cat, sat."]]) == 100
