"""Bootstrap intervals and paired tests: coverage, false positives, agreement with exact tests and sacrebleu."""

import itertools
import random

import numpy as np
import pytest
from sacrebleu.metrics import CHRF
from sacrebleu.significance import PairedTest

from transduce.contracts import EmbeddedCorpus, ScoredText, ScoreMetric, VectorMetric
from transduce.errors import InputError
from transduce.evaluation import significance
from transduce.evaluation.evaluate import METRICS, find_metric
from transduce.evaluation.significance import (
    PairedTestResult,
    approximate_randomisation,
    bootstrap_interval,
    paired_bootstrap,
    verdict,
)
from transduce.evaluation.text_metrics import ExactMatch


def outcomes(hits: np.ndarray) -> np.ndarray:
    return np.stack([hits, np.ones_like(hits)], 1).astype(float)


def text(seed: int, damage: float, lines: int = 80) -> tuple[list[str], list[list[str]]]:
    """Fixed references, and hypotheses in which words are damaged at random; seed and rate are given."""
    words, fixed, draw = (
        ["red", "green", "blue", "one", "two", "three", "go", "stay"],
        random.Random(0),
        random.Random(seed),
    )
    references = [" ".join(fixed.choices(words, k=8)) for _ in range(lines)]
    hypotheses = [
        " ".join(w if draw.random() > damage else draw.choice(words) for w in line.split()) for line in references
    ]
    return hypotheses, [[line] for line in references]


def test_interval_has_its_nominal_coverage() -> None:
    generator, truth, trials, covered = np.random.default_rng(5), 0.7, 400, 0
    for trial in range(trials):
        result = bootstrap_interval(ExactMatch(), outcomes(generator.random(120) < truth), 300, seed=trial)
        covered += result.low <= 100 * truth <= result.high
    assert 0.91 <= covered / trials <= 0.98


def test_interval_equals_explicit_resampling() -> None:
    metric = find_metric("bleu")
    statistics = metric.statistics(*text(1, 0.3))
    draw = np.random.default_rng(99)
    scores = [metric.value(statistics[draw.integers(80, size=80)].sum(0)) for _ in range(2000)]
    result = bootstrap_interval(metric, statistics, 2000, seed=1)
    assert result.value == metric.value(statistics.sum(0))
    np.testing.assert_allclose([result.low, result.high], np.quantile(scores, [0.025, 0.975]), atol=0.8)


def test_interval_of_two_lines_equals_the_exact_one() -> None:
    # One right, one wrong: 0, 50, 100 with probabilities 1/4, 1/2, 1/4.
    result = bootstrap_interval(ExactMatch(), outcomes(np.array([1, 0])), 4000, seed=3, level=0.4)
    assert (result.low, result.value, result.high) == (50, 50, 50)
    wide = bootstrap_interval(ExactMatch(), outcomes(np.array([1, 0])), 4000, seed=3)
    assert (wide.low, wide.high) == (0, 100)


@pytest.mark.parametrize("lines", [20, 100])
@pytest.mark.parametrize("name", ["exact", "ser", "accuracy"])
@pytest.mark.parametrize("right", [0, 1])
def test_equal_outcomes_have_the_wilson_interval(lines: int, name: str, right: int) -> None:
    from scipy.stats import binomtest

    metric = find_metric(name)
    result = bootstrap_interval(metric, outcomes(np.full(lines, right)), 100, seed=1)
    interval = binomtest(lines * right, lines).proportion_ci(0.95, "wilson")
    expected = sorted(metric.value(np.array([lines * rate, lines])) for rate in (interval.low, interval.high))
    np.testing.assert_allclose([result.low, result.high], expected, atol=1e-9)
    assert result.value == metric.value(np.array([lines * right, lines]))


def test_equal_lines_of_other_metrics_are_resampled() -> None:
    metric = find_metric("cer")
    result = bootstrap_interval(metric, metric.statistics(["abcd"] * 30, [["abcd"]] * 30), 100, seed=1)
    assert (result.low, result.value, result.high) == (0, 0, 0)


def test_the_same_seed_gives_the_same_interval_in_any_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = outcomes(np.random.default_rng(0).random(50) < 0.5)
    whole = bootstrap_interval(ExactMatch(), statistics, 100, seed=4)
    monkeypatch.setattr(significance, "_CHUNK", 50 * 7)
    assert bootstrap_interval(ExactMatch(), statistics, 100, seed=4) == whole
    assert bootstrap_interval(ExactMatch(), statistics, 100, seed=5) != whole


@pytest.mark.parametrize("test", [paired_bootstrap, approximate_randomisation])
def test_identical_systems_have_p_value_one(test: object) -> None:
    for name in ("bleu", "chrf", "wer"):
        metric = find_metric(name)
        statistics = metric.statistics(*text(2, 0.3))
        result = test(metric, statistics, statistics.copy(), 200, 1)  # type: ignore[operator]
        assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)


@pytest.mark.parametrize("test", [paired_bootstrap, approximate_randomisation])
def test_false_positive_rate_is_the_significance_level(test: object) -> None:
    generator, trials, rejected = np.random.default_rng(8), 400, 0
    for trial in range(trials):
        a, b = (outcomes(generator.random(150) < 0.6) for _ in range(2))
        rejected += test(ExactMatch(), a, b, 200, trial).p_value < 0.05  # type: ignore[operator]
    assert 0.02 <= rejected / trials <= 0.085


def test_approximate_randomisation_agrees_with_all_permutations() -> None:
    generator = np.random.default_rng(4)
    metric = find_metric("wer")
    a, b = (np.stack([generator.integers(0, 5, 9), np.full(9, 6)], 1).astype(float) for _ in range(2))
    observed = abs(metric.value(a.sum(0)) - metric.value(b.sum(0)))
    extreme = 0
    for swaps in itertools.product([False, True], repeat=9):
        mask = np.array(swaps)[:, None]
        first, second = np.where(mask, b, a).sum(0), np.where(mask, a, b).sum(0)
        extreme += abs(metric.value(first) - metric.value(second)) >= observed - 1e-9
    assert approximate_randomisation(metric, a, b, 4000, 1).p_value == pytest.approx(extreme / 2**9, abs=0.03)


@pytest.mark.parametrize("damage", [0.24, 0.27, 0.5])
def test_agreement_with_sacrebleu(damage: float) -> None:
    (a, references), (b, _) = text(1, 0.25), text(2, damage)
    metric = find_metric("chrf")
    statistics = metric.statistics(a, references), metric.statistics(b, references)
    streams = [[line[0] for line in references]]
    results = {}
    for kind in ("bs", "ar"):
        _, scores = PairedTest([("a", a), ("b", b)], {"chrF": CHRF()}, streams, kind, n_samples=1500)()
        results[kind] = scores["chrF2"]
    ours = paired_bootstrap(metric, *statistics, 1500, seed=1)
    theirs = results["bs"]
    assert ours.difference == pytest.approx(theirs[0].score - theirs[1].score, abs=1e-6)
    half = (
        bootstrap_interval(metric, statistics[1], 1500, seed=1).high
        - bootstrap_interval(metric, statistics[1], 1500, 1).low
    ) / 2
    assert half == pytest.approx(theirs[1].ci, abs=0.3)
    # Theirs is one tail of ours where the difference is clear, and folded at 0 where it is not.
    if damage == 0.5:
        assert ours.p_value < 0.01
        assert theirs[1].p_value < 0.01
    else:
        assert theirs[1].p_value - 0.03 <= ours.p_value <= 1
    assert approximate_randomisation(metric, *statistics, 1500, seed=1).p_value == pytest.approx(
        results["ar"][1].p_value, abs=0.04
    )


def test_the_one_tailed_p_value_of_sacrebleu_is_half_of_ours() -> None:
    """Where every resampled difference has the same sign, sacrebleu's statistic is the upper tail of ours."""
    (a, references), (b, _) = text(1, 0.25, 150), text(2, 0.33, 150)
    metric = find_metric("chrf")
    streams = [[line[0] for line in references]]
    _, scores = PairedTest([("a", a), ("b", b)], {"chrF": CHRF()}, streams, "bs", n_samples=3000)()
    ours = paired_bootstrap(metric, metric.statistics(a, references), metric.statistics(b, references), 3000, seed=1)
    assert ours.p_value == pytest.approx(2 * scores["chrF2"][1].p_value, abs=0.02)


def test_verdict_names_a_better_system_only_if_significant() -> None:
    names = ("attention", "bottleneck")
    assert verdict(PairedTestResult(0.4, -0.3, 1.1, 0.31), names) == "no significant difference (p = 0.31)"
    assert verdict(PairedTestResult(9.9, -1, 20, 0.05), names) == "no significant difference (p = 0.050)"
    won = verdict(PairedTestResult(2.5, 1.5, 3.5, 0.002), names)
    assert won == "attention is better than bottleneck by 2.50, 95 % interval 1.50 to 3.50 (p = 0.002)"
    assert verdict(PairedTestResult(-2.5, -3.5, -1.5, 0.002), names).startswith(
        "bottleneck is better than attention by 2.50, "
    )
    assert verdict(PairedTestResult(-2.5, -3.5, -1.5, 0.0009, False), names).startswith("attention is better")
    assert "p < 0.001" in verdict(PairedTestResult(-2.5, -3.5, -1.5, 0.0009, False), names)


TAGS = ("B-A", "I-A", "O", "B-C", "I-C")


def system(name: str, damage: float, lines: int = 60) -> np.ndarray:
    """The statistics of an output whose words, log-probabilities or embeddings are damaged."""
    draw, metric = random.Random(5), METRICS[name]()
    if isinstance(metric, VectorMetric):
        noise = np.random.default_rng(3).normal(size=(2, lines, 8))
        golds = [draw.random() for _ in range(lines)]
        vectors = noise[0] if name != "spearman" else np.array([[gold, 1, *[0] * 6] for gold in golds])
        queries = vectors + damage * 4 * noise[1]
        documents = vectors if name != "spearman" else np.eye(8)[:1].repeat(lines, 0)
        return metric.statistics(EmbeddedCorpus(queries, documents, [[row] for row in range(lines)], golds))
    if isinstance(metric, ScoreMetric):
        return metric.statistics([ScoredText(-draw.random() - 9 * damage, 5, 5, 9) for _ in range(lines)])
    if name in ("bertscore", "comet"):  # their statistics are a score and a count
        return np.array([[draw.random() - damage, 1.0] for _ in range(lines)])
    gold = [[draw.choice(TAGS) for _ in range(draw.randint(5, 9))] for _ in range(lines)]
    output = [" ".join(word if draw.random() >= damage else draw.choice(TAGS) for word in line) for line in gold]
    return metric.statistics(output, [[" ".join(line)] for line in gold])


# spBLEU is BLEU with a tokenizer that needs a file.
@pytest.mark.parametrize("name", [name for name in METRICS if name != "spbleu"])
def test_every_metric_has_a_paired_test(name: str) -> None:
    good, bad, metric = system(name, 0.05), system(name, 0.9), METRICS[name]()
    for test in (paired_bootstrap, approximate_randomisation):
        result = test(metric, good, bad, 200, 1)
        assert result.p_value < 0.05
        assert (result.difference > 0) == metric.higher_is_better
        assert test(metric, good, good, 50, 1).p_value == 1


def test_invalid_input_is_named() -> None:
    with pytest.raises(InputError, match="2 of one system, 3 of the other"):
        paired_bootstrap(ExactMatch(), np.ones((2, 2)), np.ones((3, 2)), 10, 1)
    with pytest.raises(InputError, match="no lines"):
        bootstrap_interval(ExactMatch(), np.zeros((0, 2)), 10, 1)
