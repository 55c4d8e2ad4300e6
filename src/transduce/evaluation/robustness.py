"""Robustness and bias probes: outputs and scores after perturbations of the source."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transduce.contracts import TextMetric
from transduce.errors import InputError, nearest
from transduce.evaluation.evaluate import MetricSpec, SystemOutput, find_metric, line_statistics
from transduce.evaluation.held_out import HeldOutExample, predict
from transduce.evaluation.significance import paired_bootstrap
from transduce.inference import Model

Perturbation = Callable[[str, random.Random, float], str]  # text, chance, rate -> perturbed text
_WORD = re.compile(r"\w+")
OCR = {"0": "O", "O": "0", "1": "l", "l": "1", "5": "S", "S": "5", "rn": "m", "m": "rn", "cl": "d", "e": "c", "B": "8"}
_OCR = re.compile("|".join(sorted(map(re.escape, OCR), key=len, reverse=True)))


def _per_word(change: Callable[[str, random.Random], str]) -> Perturbation:
    """A perturbation of each word of two or more letters with probability `rate`."""

    def perturb(text: str, chance: random.Random, rate: float) -> str:
        def one(match: re.Match[str]) -> str:
            word = match[0]
            return change(word, chance) if len(word) > 1 and chance.random() < rate else word

        return _WORD.sub(one, text)

    return perturb


def swapped(word: str, chance: random.Random) -> str:
    """Two neighbouring letters in the other order."""
    place = chance.randrange(len(word) - 1)
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def deleted(word: str, chance: random.Random) -> str:
    place = chance.randrange(len(word))
    return word[:place] + word[place + 1 :]


def doubled(word: str, chance: random.Random) -> str:
    place = chance.randrange(len(word))
    return word[: place + 1] + word[place:]


def confused(text: str, chance: random.Random, rate: float) -> str:
    """Characters that optical recognition takes for each other."""
    return _OCR.sub(lambda match: OCR[match[0]] if chance.random() < rate else match[0], text)


# Each keeps the meaning of a text, so its references stay right.
PERTURBATIONS: dict[str, Perturbation] = {
    "swap": _per_word(swapped),
    "delete": _per_word(deleted),
    "double": _per_word(doubled),
    "ocr": confused,
    "upper": lambda text, chance, rate: text.upper(),
    "lower": lambda text, chance, rate: text.lower(),
    "punctuation": lambda text, chance, rate: re.sub(r"(?<=\w)\s*[.!?,;:]+(?=\s|$)", "", text),
}


ADVERSARIAL = "adversarial"  # a perturbation that looks at the model, so it is made only where it is asked for
TRIES = 16  # typing errors of which the worst is taken


def adversarial_sources(model: Model, lines: Sequence[HeldOutExample], seed: int) -> list[str]:
    """Of some sources with one typing error, that with which the reference is least probable (Pruthi et al. 2019)."""
    tried = [misspelt(line.source, random.Random(f"{seed} {ADVERSARIAL} {row}")) for row, line in enumerate(lines)]
    pairs = [(text, line.references[0]) for line, texts in zip(lines, tried, strict=True) for text in texts]
    scores = iter(model.score(pairs))
    ranked = [[(next(scores).score, text) for text in texts] for texts in tried]
    return [min(found)[1] if found else line.source for line, found in zip(lines, ranked, strict=True)]


def misspelt(text: str, chance: random.Random, tries: int = TRIES) -> list[str]:
    """Different texts with one typing error in one word; none where no word has two letters."""
    words = [match for match in _WORD.finditer(text) if len(match[0]) > 1]
    found = dict[str, None]()
    for _ in range(tries if words else 0):
        word, change = chance.choice(words), chance.choice((swapped, deleted, doubled))
        found[text[: word.start()] + change(word[0], chance) + text[word.end() :]] = None
    found.pop(text, None)  # two equal letters exchanged
    return list(found)


def substitute(text: str, pairs: Mapping[str, str]) -> str:
    """Exchanges the words of all pairs at once, in both directions, as whole words; a capital stays a capital."""
    both = {**{b: a for a, b in pairs.items()}, **pairs}

    def other(match: re.Match[str]) -> str:
        word = match[0]
        found = both.get(word) or both.get(word.lower())
        return word if found is None else found.capitalize() if word[:1].isupper() and word not in both else found

    return _WORD.sub(other, text)


def parse_substitutions(lines: Iterable[str], where: str) -> dict[str, str]:
    """Pairs of words, `he TAB she` a line."""
    pairs: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("\t")
        if len(words) != 2 or not all(_WORD.fullmatch(word) for word in words):
            raise InputError(
                "expected two words with a tab between them", where=f"{where}:{number}", remedy="he TAB she"
            )
        pairs[words[0]] = words[1]
    if not pairs:
        raise InputError("there are no words to exchange", where=where, remedy="write `he TAB she`, one pair a line")
    return pairs


@dataclass(frozen=True)
class ProbeScore:
    """A metric on clean and on perturbed sources, and the paired test of their difference (clean minus perturbed)."""

    clean: float
    perturbed: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Probe:
    """The effect of one perturbation. Scores are of the same references; a substitution has none."""

    name: str
    changed_sources: float  # % of the lines that the perturbation changes
    changed_outputs: float  # % of these lines whose output changes; of a substitution, more than by the substitution
    scores: dict[str, ProbeScore]
    examples: list[tuple[str, str, str, str]]  # source, output, perturbed source, its output

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ProbeSettings:
    """Which perturbations are made, how often, and which pairs of words are exchanged."""

    names: Sequence[str] = tuple(PERTURBATIONS)
    rate: float = 0.1  # probability that a word or character is perturbed
    seed: int = 1
    substitutions: Mapping[str, str] | None = None  # such as he -> she, in both directions
    examples: int = 3  # changed outputs that are reported


def probe(model: Model, lines: Sequence[HeldOutExample], settings: ProbeSettings) -> list[Probe]:
    """The probes of a model on held-out pairs: outputs for the sources as they are, and for perturbed ones."""
    if not model.source_encoding.reads_text or model.sourceless:
        raise InputError("only a model that reads texts can be probed", remedy="name a run with text sources")
    for name in settings.names:
        if name not in (known := [*PERTURBATIONS, ADVERSARIAL]):
            raise InputError(f"no perturbation is called {name!r}", remedy=nearest(name, known))
    metrics = [name for name in model.recipe.evaluation.metrics if isinstance(find_metric(name), TextMetric)]
    if not metrics:
        raise InputError("only models whose output is text can be probed", remedy="name a run that generates texts")
    clean = predict(model, lines, metrics)
    probes = []
    for name in settings.names:
        sources = _perturbed(model, lines, name, settings)
        probes.append(_compared(model, lines, sources, clean, metrics, replace(settings, names=(name,))))
    if settings.substitutions:
        probes.append(_exchanged(model, lines, clean, metrics, settings))
    return probes


def _perturbed(model: Model, lines: Sequence[HeldOutExample], name: str, settings: ProbeSettings) -> list[str]:
    if name == ADVERSARIAL:
        return adversarial_sources(model, lines, settings.seed)
    return [
        PERTURBATIONS[name](line.source, random.Random(f"{settings.seed} {name} {number}"), settings.rate)
        for number, line in enumerate(lines)
    ]


def _outputs(
    model: Model, lines: Sequence[HeldOutExample], sources: Sequence[str], metrics: Sequence[MetricSpec]
) -> SystemOutput:
    """The outputs for other sources of the same lines."""
    return predict(model, [replace(line, source=text) for line, text in zip(lines, sources, strict=True)], metrics)


def _compared(
    model: Model,
    lines: Sequence[HeldOutExample],
    sources: Sequence[str],
    clean: SystemOutput,
    metrics: Sequence[MetricSpec],
    settings: ProbeSettings,
) -> Probe:
    # Metrics that read the source compare with what was meant.
    perturbed = replace(_outputs(model, lines, sources, metrics), sources=clean.sources)
    references = [line.references for line in lines]
    scores = {}
    for metric in map(find_metric, metrics):
        a, b = (line_statistics(metric, output, references) for output in (clean, perturbed))
        test = paired_bootstrap(metric, a, b, model.recipe.evaluation.resamples, seed=1)
        values = metric.value(a.sum(0)), metric.value(b.sum(0))
        scores[metric.name] = ProbeScore(*values, test.low, test.high, test.p_value)
    return _report(settings.names[0], lines, sources, (clean, perturbed), settings.examples, scores)


def _exchanged(
    model: Model,
    lines: Sequence[HeldOutExample],
    clean: SystemOutput,
    metrics: Sequence[MetricSpec],
    settings: ProbeSettings,
) -> Probe:
    """Counterfactual sources; the expected output is the clean one with the same words exchanged."""
    pairs = settings.substitutions or {}
    sources = [substitute(line.source, pairs) for line in lines]
    found = _outputs(model, lines, sources, metrics)
    expected = SystemOutput([substitute(text, pairs) for text in clean.texts or ()])
    return _report("substitution", lines, sources, (expected, found), settings.examples, {})


def _report(
    name: str,
    lines: Sequence[HeldOutExample],
    sources: Sequence[str],
    outputs: tuple[SystemOutput, SystemOutput],
    examples: int,
    scores: dict[str, ProbeScore],
) -> Probe:
    before, after = (output.texts or () for output in outputs)
    touched = [row for row, line in enumerate(lines) if line.source != sources[row]]
    moved = [row for row in touched if before[row] != after[row]]
    shown = [(lines[row].source, before[row], sources[row], after[row]) for row in moved[:examples]]
    shares = 100 * len(touched) / max(len(lines), 1), 100 * len(moved) / max(len(touched), 1)
    return Probe(name, *shares, scores, shown)
