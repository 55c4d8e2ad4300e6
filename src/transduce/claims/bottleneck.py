"""Claim about the bottleneck: quality against source length, with one context vector and with attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transduce.build import complete_recipe
from transduce.claims.claim import (
    ATTENTION,
    ONE_VECTOR,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    letters,
    recipe,
    scaled,
)
from transduce.data.readers.corpus import read_corpus
from transduce.evaluation.candidates import match_parameters
from transduce.evaluation.evaluate import LengthBucket, by_length, find_metric
from transduce.evaluation.significance import SIGNIFICANCE_LEVEL, PairedTestResult, approximate_randomisation
from transduce.flow import Example
from transduce.inference import Model
from transduce.recipe import parse
from transduce.recipe.data import Corpus
from transduce.synthetic.dates import split as split_dates

WIDTH = 64
FLOOR = 5.0  # a score
SYMBOLS = tuple("abcdefghij")


@dataclass(frozen=True)
class LengthTask:
    """Pairs to train and test on, the unit of their length, and the metric."""

    name: str
    data: Mapping[str, str]
    test: Sequence[Example]
    tokens: Mapping[str, Any]
    metric: str
    steps: int

    def recipe(self, model: Mapping[str, Any]) -> dict[str, Any]:
        settings = recipe(self.data, model, self.steps, batch_tokens=1536)
        evaluation = {"metrics": [self.metric], "resamples": 100}
        return {**settings, "tokens": dict(self.tokens), "evaluation": evaluation}


@dataclass(frozen=True)
class ScoredSystem:
    """The statistics of each test line of a model, and its scores by source length."""

    parameters: int
    statistics: np.ndarray
    score: float
    buckets: Sequence[LengthBucket]


def tasks(budget: Budget) -> list[LengthTask]:
    """Reversed letters, written dates, and the pairs of the user, if any."""
    words, characters = ({"kind": kind, "size": 2000} for kind in ("words", "chars"))
    data, test = letters(budget, symbols=SYMBOLS)
    found = [
        LengthTask(
            "reversal", data, test, {"source": words, "target": words, "shared": True}, "exact", budget.pick(350, 1000)
        )
    ]
    train, dev, dates = split_dates(20_000, 200, budget.pick(500, 1000), locales=("en_US", "en_GB", "de", "fr"))
    files = {"train": budget.write_pairs("dates-train", train), "dev": budget.write_pairs("dates-dev", dev)}
    files["cache"] = str(budget.folder / "cache")
    tokens = {"source": characters, "target": characters}
    found.append(LengthTask("dates", files, dates, tokens, "exact", budget.pick(250, 800)))
    return [*found, *([] if budget.data is None else [_own_pairs(budget)])]


def _own_pairs(budget: Budget) -> LengthTask:
    """The pairs of the user: every twentieth is a test pair, every twentieth a development pair."""
    pairs = list(read_corpus(Corpus(path=str(budget.data)), "error"))
    parts = {"train": [one for number, one in enumerate(pairs) if number % 20 > 1], "dev": pairs[::20][:300]}
    data = {name: budget.write_pairs(f"own-{name}", part) for name, part in parts.items()}
    data["cache"] = str(budget.folder / "cache")
    tokens = {side: {"kind": "bpe", "size": 4000} for side in ("source", "target")}
    return LengthTask("own pairs", data, pairs[1::20][:1000], tokens, "chrf", budget.pick(600, 4000))


def equal_parameters(model: Mapping[str, Any], like: Model) -> dict[str, Any]:
    """The model with widths that give it about as many parameters as another has."""
    completed = complete_recipe(parse({"model": model, "tokens": {"shared": True}})).model
    matched = match_parameters(completed, like.parameters, like.source.size, like.target.size)
    return {side: getattr(matched, side) for side in ("encoder", "decoder")}


def scored(budget: Budget, task: LengthTask, name: str, model: Mapping[str, Any]) -> tuple[Model, ScoredSystem]:
    trained = budget.train(f"bottleneck-{task.name.replace(' ', '-')}-{name}", task.recipe(model))
    outputs = trained.generate([one.source for one in task.test])
    metric = find_metric(task.metric)
    references = [[one.target or ""] for one in task.test]
    statistics = metric.statistics([out.text for out in outputs], references)  # type: ignore[attr-defined]
    lengths = [len(trained.source.encode(one.source).ids) for one in task.test]
    buckets = by_length(metric, statistics, lengths, resamples=300, seed=budget.seed)
    return trained, ScoredSystem(trained.parameters, statistics, metric.value(statistics.sum(0)), buckets)


def measure_bottleneck(budget: Budget) -> Measurement:
    panels, checks, rows = [], [], []
    for task in tasks(budget):
        attention, first = scored(budget, task, "attention", scaled(ATTENTION, WIDTH))
        systems = {"attention": first}
        equal = equal_parameters(scaled(ONE_VECTOR, WIDTH), attention)
        systems["one vector, equal parameters"] = scored(budget, task, "one-vector", equal)[1]
        if task.name == "reversal":  # what a narrower and a wider vector change
            systems["one vector, half the width"] = scored(budget, task, "narrow", scaled(ONE_VECTOR, WIDTH // 2))[1]
            systems["one vector, twice the width"] = scored(budget, task, "wide", scaled(ONE_VECTOR, 2 * WIDTH))[1]
        one, other = systems["attention"], systems["one vector, equal parameters"]
        test = approximate_randomisation(find_metric(task.metric), one.statistics, other.statistics, 1000, budget.seed)
        checks += _checks(task, systems, test)
        rows += [(task.name, name, system.parameters, system.score) for name, system in systems.items()]
        panels.append(Panel(f"{task.name}: {task.metric}", "source length", task.metric, _curves(systems)))
    table = ClaimTable("", ["task", "model", "parameters", "score"], rows)
    return Measurement([table, *_length_tables(panels)], panels, checks)


def _checks(task: LengthTask, systems: Mapping[str, ScoredSystem], test: PairedTestResult) -> list[Check]:
    one, other = systems["attention"], systems["one vector, equal parameters"]
    gaps = [a.interval.value - b.interval.value for a, b in zip(one.buckets, other.buckets, strict=True)]
    numbers = {"difference": test.difference, "low": test.low, "high": test.high, "p": test.p_value}
    better = test.difference > 0 and test.p_value < SIGNIFICANCE_LEVEL
    checks = [Check(f"{task.name}: attention is better than one vector at equal parameters", better, numbers)]
    if other.score > FLOOR:  # a model that has learned nothing fails at every length
        halves = [float(np.mean(part)) for part in (gaps[: len(gaps) // 2], gaps[len(gaps) // 2 :])]
        statement = f"{task.name}: the difference is larger in the longer half of the sources"
        checks.append(Check(statement, halves[1] > halves[0], {"shorter": halves[0], "longer": halves[1]}))
    if "one vector, half the width" in systems:
        scores = [systems[f"one vector, {size} the width"].score for size in ("half", "twice")]
        numbers = {"half the width": scores[0], "twice the width": scores[1]}
        checks.append(Check(f"{task.name}: a wider vector holds more", scores[1] > scores[0], numbers))
    return checks


def _curves(systems: Mapping[str, ScoredSystem]) -> list[Series]:
    curves = []
    for name, system in systems.items():
        intervals = [bucket.interval for bucket in system.buckets]
        middles = [(bucket.low + bucket.high) / 2 for bucket in system.buckets]
        bounds = [one.low for one in intervals], [one.high for one in intervals]
        curves.append(Series(name, middles, [one.value for one in intervals], *bounds))
    return curves


def _length_tables(panels: Sequence[Panel]) -> list[ClaimTable]:
    """The values of the curves, with their 95 % intervals."""
    tables = []
    for panel in panels:
        rows = []
        for series in panel.series:
            values = zip(series.y, series.low, series.high, strict=True)
            rows.append((series.label, *(f"{value:.1f} ({low:.1f}–{high:.1f})" for value, low, high in values)))
        columns = ["model", *(f"length {float(x):g}" for x in panel.series[0].x)]
        tables.append(ClaimTable(f"By source length, {panel.title}, with 95 % intervals", columns, rows))
    return tables


BOTTLENECK = Claim(
    "bottleneck",
    "One context vector between two recurrent networks is a bottleneck: quality falls with the length of the source, "
    "and attention removes it.",
    "Cho et al. 2014, On the Properties of Neural Machine Translation; Bahdanau et al. 2015, figure 2",
    "GRU models with attention and with one vector, of equal numbers of parameters, equal data and equal updates, "
    "scored by source length with bootstrap intervals; the difference is tested by approximate randomisation on the "
    "same lines. With --data, the same on your own pairs, such as a translation corpus.",
    measure_bottleneck,
    frozenset({"data"}),
)
