"""Scores by source length, and the evaluation of a whole output."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.errors import InputError
from transduce.evaluation.evaluate import bucket_edges, by_length, draw_by_length, evaluate
from transduce.evaluation.text_metrics import ExactMatch


def outcomes(hits: list[bool]) -> np.ndarray:
    return np.array([[hit, 1.0] for hit in hits])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60) | st.integers(0, 5000), min_size=1, max_size=300))
def test_buckets_partition_the_lines_and_have_a_minimum_size(lengths: list[int]) -> None:
    buckets = by_length(ExactMatch(), outcomes([True] * len(lengths)), lengths, resamples=2)
    assert sum(bucket.count for bucket in buckets) == len(lengths)
    assert buckets[0].low == min(lengths)
    assert buckets[-1].high == max(lengths)
    for bucket in buckets:
        assert bucket.count == sum(bucket.low <= length <= bucket.high for length in lengths)
        assert bucket.count >= min(30, len(lengths))
    for before, after in pairwise(buckets):
        assert after.low == before.high + 1


def test_bucket_edges_are_round_and_robust_to_outliers() -> None:
    lengths = [length for length in range(1, 41) for _ in range(20)]
    assert bucket_edges(lengths) == [5, 10, 15, 20, 25, 30, 35, 40]
    assert bucket_edges([*lengths, 3000])[:7] == [5, 10, 15, 20, 25, 30, 35]
    assert bucket_edges([3, 4, 9]) == [9]


def test_the_score_of_a_bucket_is_that_of_its_lines() -> None:
    lengths = [3] * 40 + [8] * 40
    hits = [True] * 40 + [True, False] * 20
    short, long = by_length(ExactMatch(), outcomes(hits), lengths, resamples=200)
    assert (short.interval.value, short.interval.high) == (100, 100)
    assert short.interval.low == pytest.approx(100 * 40 / (40 + 1.96**2), abs=0.01)  # Wilson
    assert long.interval.value == 50
    assert 30 < long.interval.low < 50 < long.interval.high < 70


def test_given_buckets_are_used_and_longer_lines_get_their_own() -> None:
    buckets = by_length(ExactMatch(), outcomes([True] * 4), [1, 4, 5, 99], buckets=[4, 8], resamples=2)
    assert [(bucket.low, bucket.high, bucket.count) for bucket in buckets] == [(1, 4, 2), (5, 8, 1), (9, 99, 1)]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    lengths = [length for length in range(1, 31) for _ in range(10)]
    hits = [length < 20 for length in lengths]
    line = by_length(ExactMatch(), outcomes(hits), lengths, resamples=50)
    series = {"attention": line, "_bottleneck $x^": line[:1], "nothing": []}
    draw_by_length(series, tmp_path / "lengths.png", "exact match (%)")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_evaluate_returns_scores_and_buckets() -> None:
    hypotheses = ["a b c d e", "a b c d x", "q"] * 20
    references = [["a b c d e"], ["a b c d e"], ["q", "r"]] * 20
    result = evaluate(hypotheses, references, [5, 6, 1] * 20, ["exact", "bleu", "wer"], resamples=50, seed=1)
    assert result.count == 60
    assert result.scores["exact"].value == pytest.approx(200 / 3)
    assert result.scores["exact"].low < 200 / 3 < result.scores["exact"].high
    assert result.scores["wer"].value == pytest.approx(100 / 11)
    assert result.scores["bleu"].signature.startswith("nrefs:var|")
    content = json.loads(json.dumps(result.to_json()))
    assert content["scores"]["wer"]["higher_is_better"] is False
    assert sum(bucket["count"] for bucket in content["by_length"]["exact"]) == 60
    assert evaluate(hypotheses, references, [5, 6, 1] * 20, ["exact"], 50, 1).scores["exact"] == result.scores["exact"]


def test_invalid_input_is_named() -> None:
    with pytest.raises(InputError, match="did you mean 'bleu'"):
        evaluate(["a"], ["a"], [1], ["blue"])
    with pytest.raises(InputError, match="2 hypotheses but 3 references"):
        evaluate(["a", "b"], ["a", "b", "c"], [1, 1], ["exact"])
    with pytest.raises(InputError, match="2 hypotheses but 1 sources"):
        evaluate(["a", "b"], ["a", "b"], [1], ["exact"])
    with pytest.raises(InputError, match="no lines to evaluate"):
        evaluate([], [], [], ["exact"])
    with pytest.raises(InputError, match="3 lines were scored but 2"):
        by_length(ExactMatch(), np.ones((3, 2)), [1, 2])
