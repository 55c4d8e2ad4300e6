"""Claims about the bottleneck: quality against source length, and what one context vector holds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import numpy as np
import torch

from transduce.data.readers.corpus import read_corpus
from transduce.evaluation.claims.claim import (
    ATTENTION,
    ONE_VECTOR,
    TRANSFORMER,
    Budget,
    Check,
    Claim,
    ClaimTable,
    Measurement,
    Panel,
    Series,
    letters,
    random_batch,
    recipe,
    scaled,
    untrained,
)
from transduce.evaluation.comparison import match_parameters
from transduce.evaluation.evaluate import LengthBucket, by_length, find_metric
from transduce.evaluation.significance import SIGNIFICANCE_LEVEL, PairedTestResult, approximate_randomisation
from transduce.flow import SPECIALS, Batch, Example, Memory, Padded
from transduce.inference import Model
from transduce.inference.retrieval import pca
from transduce.model import EncoderDecoder, Transducer
from transduce.recipe import parse
from transduce.recipe.build import complete_recipe
from transduce.recipe.data import Corpus
from transduce.synthetic import generate
from transduce.synthetic.dates import split as split_dates

WIDTH = 64
FLOOR = 5.0  # a score
SYMBOLS = tuple("abcdefghij")
NAMES = ("anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo")
VERBS = {"sees": "seen", "helps": "helped", "calls": "called", "thanks": "thanked", "hears": "heard", "likes": "liked"}
LENGTH, NEAR, FAR = 24, 1, 20


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
    """Reversed letters, written dates, generated translations, and the pairs of the user, if any."""
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
    found.append(LengthTask("dates", files, dates, tokens, "exact", budget.pick(800, 2000)))
    found.append(_translations(budget, {"source": words, "target": words}))
    return [*found, *([] if budget.data is None else [_own_pairs(budget)])]


def _translations(budget: Budget, tokens: Mapping[str, Any]) -> LengthTask:
    """English sentences of a small grammar, in German; no sentence of the test occurs in training."""
    parts = {
        "train": generate("translations", 8000, 1),
        "dev": generate("translations", 200, 1, held_out=True),
        "test": generate("translations", budget.pick(500, 1000), 3, held_out=True),
    }
    data = {name: budget.write_pairs(f"translations-{name}", parts[name]) for name in ("train", "dev")}
    data["cache"] = str(budget.folder / "cache")
    return LengthTask("translation", data, list(parts["test"]), tokens, "exact", budget.pick(1200, 2000))


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
    "same lines. The tasks are reversed letters, dates, and translations of a small grammar; with --data, the same on "
    "your own pairs, such as a translation corpus. Translations are scored by exact match after 1,200 updates, chosen "
    "on development sentences, of which one vector translates hardly any after 600; the test sentences were "
    "generated afterwards. After 150 updates, when it translates none, chrF differs more in the shorter half.",
    measure_bottleneck,
    frozenset({"data"}),
)


def one_vector(cell: str, width: int = 64) -> dict[str, Any]:
    """A recurrent encoder that reads from left to right, whose last state is all that the decoder gets."""
    part = {"kind": "recurrent", "cell": cell, "width": width, "dropout": 0.0}
    return {"encoder": {**part, "bidirectional": False}, "decoder": {**part, "context": "initial"}}


@dataclass(frozen=True)
class Meaning:
    """Who does what to whom, with its sentences in the active and in the passive voice."""

    agent: str
    verb: str
    patient: str

    @property
    def active(self) -> str:
        return f"{self.agent} {self.verb} {self.patient}"

    @property
    def passive(self) -> str:
        return f"{self.patient} is {VERBS[self.verb]} by {self.agent}"

    @property
    def exchanged(self) -> Meaning:
        """The same words, and another meaning."""
        return Meaning(self.patient, self.verb, self.agent)

    def examples(self) -> Iterator[Example]:
        """The target names the roles in one order, whatever the voice."""
        for sentence in (self.active, self.passive):
            yield Example(sentence, f"{self.verb} {self.agent} {self.patient}")


def meanings(seed: int) -> tuple[list[Meaning], list[Meaning]]:
    """All meanings for training and test: no pair of names of the test occurs in training."""
    pairs = [pair for pair in permutations(NAMES, 2) if pair[0] < pair[1]]
    random.Random(seed).shuffle(pairs)
    cut = len(pairs) * 4 // 5

    def both_roles(part: Sequence[tuple[str, str]]) -> list[Meaning]:
        found = [Meaning(one, verb, other) for (one, other), verb in product(part, VERBS)]
        return [way for meaning in found for way in (meaning, meaning.exchanged)]

    return both_roles(pairs[:cut]), both_roles(pairs[cut:])


@torch.no_grad()
def context_vectors(network: Transducer, model: Model, texts: Sequence[str]) -> np.ndarray:
    """The context vector of each text, by a network that reads the tokens of a model."""
    assert isinstance(network, EncoderDecoder)
    batch = model.source_encoding.batch(model.source_encoding.encode(texts))
    summary: torch.Tensor = network.encoder(batch.to(model.device)).summary
    return summary.float().cpu().numpy()


def voice_closer_than_words(vectors: np.ndarray) -> float:
    """Rows: active, passive, exchanged of each meaning. The share whose passive is closer than the exchanged one."""
    active, passive, exchanged = vectors[0::3], vectors[1::3], vectors[2::3]
    closer = np.linalg.norm(active - passive, axis=1) < np.linalg.norm(active - exchanged, axis=1)
    return float(closer.mean())


def measure_context_vector(budget: Budget) -> Measurement:
    train, test = meanings(1)
    data = {
        "train": budget.write_pairs("voices-train", (one for meaning in train for one in meaning.examples())),
        "dev": budget.write_pairs("voices-dev", (one for meaning in test for one in meaning.examples())),
        "cache": str(budget.folder / "cache"),
    }
    spec = one_vector("lstm")
    model = budget.train("context-vector", recipe(data, spec, budget.pick(300, 1000)))
    texts = [text for one in test for text in (one.active, one.passive, one.exchanged.active)]
    fresh = untrained(spec, budget.seed, model.source.size)
    learned, before = (voice_closer_than_words(context_vectors(one, model, texts)) for one in (model.network, fresh))
    checks = [
        Check(
            "the passive is closer to its active sentence than the same words with exchanged roles",
            learned > 0.8 and learned > before + 0.3,
            {"trained": learned, "untrained": before, "counts of words": 0.0},
        )
    ]
    table = ClaimTable(
        "Share of sentences whose passive is closer than the exchanged sentence",
        ["context vector", "share"],
        [("trained to name the roles", learned), ("untrained", before), ("counts of words", 0.0)],
    )
    return Measurement([table], _voices(model, test), checks)


def _voices(model: Model, test: Sequence[Meaning]) -> list[Panel]:
    """A map of the sentences of one verb."""
    verb = test[0].verb
    chosen = [one for one in test if one.verb == verb][:8]
    texts = [text for one in chosen for text in (one.active, one.passive)]
    points = pca(context_vectors(model.network, model, texts)).points
    series = [
        Series(voice, points[start::2, 0].tolist(), points[start::2, 1].tolist(), names=texts[start::2])
        for start, voice in enumerate(("active", "passive"))
    ]
    return [Panel(f"Context vectors of sentences with `{verb}`", "", "", series, "points")]


CONTEXT_VECTOR = Claim(
    "context-vector",
    "One vector holds the meaning of a sentence, with its word order: active and passive lie close together, the same "
    "words with exchanged roles lie apart.",
    "Sutskever et al. 2014, Sequence to Sequence Learning with Neural Networks, figure 2",
    "An LSTM encoder-decoder without attention learns to name verb, agent and patient of sentences in the active and "
    "the passive voice. For pairs of names that it has not seen together, the last encoder state of a sentence is "
    "compared with that of its passive and with that of the same words with exchanged roles, and drawn on the two "
    "principal components.",
    measure_context_vector,
)


LAST, ROW = "last state", "row of the position"  # what a decoder reads


def readers() -> dict[str, tuple[dict[str, Any], str]]:
    """Models, and what their decoder reads: the last state, or with attention the row of each position."""
    gru = one_vector("gru")
    attending = {**gru, "decoder": {**gru["decoder"], "context": {"kind": "luong", "input_feeding": False}}}
    return {
        "plain RNN": (one_vector("rnn"), LAST),
        "LSTM": (one_vector("lstm"), LAST),
        "GRU with attention": (attending, ROW),
        "Transformer": (TRANSFORMER, ROW),
    }


@torch.no_grad()
def influence(network: Transducer, ids: torch.Tensor, vocabulary: int, read: str) -> list[float]:
    """How far what the decoder reads moves if the token at distance 1, 2, ... before the end is replaced.

    Relative to its own norm, the mean over the rows of a batch. `ids` (B S) without </s>.
    """
    assert isinstance(network, EncoderDecoder)

    def memory(tokens: torch.Tensor) -> Memory:
        return network.encoder(Batch(Padded(tokens, torch.ones_like(tokens, dtype=torch.bool))))

    before, found = memory(ids), []
    for place in reversed(range(ids.size(1))):
        changed = ids.clone()
        changed[:, place] = len(SPECIALS) + (ids[:, place] - len(SPECIALS) + 1) % (vocabulary - len(SPECIALS))
        after = memory(changed)
        old, new = (one.summary if read == LAST else one.values[:, place] for one in (before, after))
        found.append(float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean()))
    return found


Curves = dict[str, list[float]]


def measure_recency(budget: Budget) -> Measurement:
    data, _ = letters(budget, "copy", count=4000, length=(LENGTH - 8, LENGTH))
    fresh, trained = dict[str, list[float]](), dict[str, list[float]]()
    for name, (spec, read) in readers().items():
        fresh[name] = influence(untrained(spec, budget.seed), _sources(budget.seed, 30), 30, read)
        label = f"recency-{name.lower().replace(' ', '-')}"
        model = budget.train(label, recipe(data, spec, budget.pick(120, 600)))
        ids = _sources(budget.seed, model.source.size).to(model.device)
        trained[name] = influence(model.network, ids, model.source.size, read)
    curves = {"untrained": fresh, "trained to copy": trained}
    columns = ["model", "read", *(f"{kind}, distance {place}" for kind in curves for place in (NEAR, FAR))]
    rows: list[tuple[str | float, ...]] = [
        (name, read, *(part[name][place - 1] for part in curves.values() for place in (NEAR, FAR)))
        for name, (_, read) in readers().items()
    ]
    title = "Relative change of what the decoder reads if one source token is replaced"
    checks = [check for kind, part in curves.items() for check in recency_checks(kind, part)]
    return Measurement([ClaimTable(title, columns, rows)], [_panel(*item) for item in curves.items()], checks)


def _sources(seed: int, vocabulary: int) -> torch.Tensor:
    source = random_batch(16, LENGTH, 1, seed, vocabulary).source
    assert source is not None
    return source.values[:, :-1]  # without </s>


def recency_checks(kind: str, curves: Curves) -> list[Check]:
    ratios = {name: one[NEAR - 1] / max(one[FAR - 1], 1e-12) for name, one in curves.items()}
    last, rows = ({name: ratios[name] for name, (_, read) in readers().items() if read == one} for one in (LAST, ROW))
    favoured = f"{kind}: the last state shows the last token at least 3 times as much as the one {FAR - 1} before it"
    alike = f"{kind}: what attention reads shows every token about alike"
    return [
        Check(favoured, min(last.values()) > 3, last),
        Check(alike, all(0.4 < ratio < 2.5 for ratio in rows.values()), rows),
    ]


def _panel(kind: str, curves: Curves) -> Panel:
    distances = list(range(1, LENGTH + 1))
    series = [Series(name, distances, [max(value, 1e-8) for value in one]) for name, one in curves.items()]
    return Panel(kind.capitalize(), "distance from the end of the source", "relative change", series, log_y=True)


RECENCY = Claim(
    "recency",
    "The last state of a recurrent encoder favours the recent past; attention reads every position alike.",
    "Cho et al. 2014, On the Properties of Neural Machine Translation; Bahdanau et al. 2015",
    f"One token of a source of {LENGTH} is replaced by another, at each distance from the end. Measured is the "
    "relative change of what the decoder reads: the last state of a plain RNN and an LSTM that read from left to "
    "right, and the row of that position for models with attention. Models are untrained, or learned to copy letters.",
    measure_recency,
)
