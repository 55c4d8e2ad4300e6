"""A model and pairs in, judgements out: held-out lines, their scores, paired tests, probabilities of given pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transduce import evaluation
from transduce.data.sources import read
from transduce.flow import Example
from transduce.predict import Model, PairScore
from transduce.prepare import prepare
from transduce.recipe import Corpora, EvaluationRecipe, parse


@dataclass(frozen=True)
class Line:
    """One source and its right answers."""

    source: str
    references: tuple[str, ...]


def as_lines(examples: Sequence[Example], settings: EvaluationRecipe) -> list[Line]:
    """One line an example, or one line a source where several answers are right."""
    if settings.references == "each":
        return [Line(example.source, (example.target or "",)) for example in examples]
    answers: dict[str, list[str]] = {}
    for example in examples:
        answers.setdefault(example.source, []).append(example.target or "")
    return [Line(source, tuple(references)) for source, references in answers.items()]


def read_corpora(corpora: Corpora, model: Model) -> list[Example]:
    return [example for corpus in corpora for example in read(corpus, model.recipe.data.invalid)]


def held_out(model: Model, data: str | None) -> tuple[str, list[Line]]:
    """The named pairs; else the test set of the run; else the pairs it held out of training."""
    settings = model.recipe
    if data is not None:
        name, examples = data, read_corpora(parse({"data": {"test": data}}).data.test, model)
    elif settings.data.test:
        name, examples = "test", read_corpora(settings.data.test, model)
    else:
        name, examples = "dev", prepare(settings, (model.source, model.target)).dev_examples()
    return name, as_lines(examples, settings.evaluation)


def score_outputs(model: Model, lines: Sequence[Line], outputs: Sequence[str]) -> evaluation.Evaluation:
    settings = model.recipe.evaluation
    lengths = [len(ids) for ids in model.source.encode_batch([line.source for line in lines])]
    references = [line.references for line in lines]
    return evaluation.evaluate(outputs, references, lengths, settings.metrics, settings.resamples)


def compare_outputs(model: Model, lines: Sequence[Line], outputs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What a paired test says of two systems on the same lines, for each metric."""
    settings = model.recipe.evaluation
    (first, one), (second, other) = outputs.items()
    references = [line.references for line in lines]
    verdicts = {}
    for metric in map(evaluation.find, settings.metrics):
        a, b = (metric.statistics(texts, references) for texts in (one, other))
        result = evaluation.paired(metric, a, b, settings.resamples, seed=1)
        verdicts[metric.name] = evaluation.verdict(result, (first, second))
    return verdicts


def score_lines(model: Model, pairs: str, *, as_json: bool, chunk: int = 2000) -> Iterator[tuple[str, PairScore]]:
    """Each pair's probability, with the line to write for it."""
    (corpus,) = parse({"data": {"test": pairs}}).data.test
    examples = read(corpus, model.recipe.data.invalid)
    while some := list(islice(examples, chunk)):
        for one in model.score([(example.source, example.target or "") for example in some]):
            content = {
                "score": one.score,
                "perplexity": one.perplexity,
                "tokens": one.tokens,
                "token_scores": one.token_scores,
            }
            yield json_line(content) if as_json else f"{one.score:.6f}\t{one.perplexity:.6g}", one


def json_line(content: Mapping[str, Any]) -> str:
    """JSON on one line, for every reader: some take these three characters for the end of a line."""
    text = json.dumps(content, ensure_ascii=False)
    return text.translate({ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"})
