"""Evaluation of a model on held-out data: examples, system output, scores, paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from transduce.contracts import EmbeddedCorpus, ScoredText, ScoreMetric, TextMetric, VectorMetric
from transduce.data.prepare import prepare_data
from transduce.data.readers.corpus import read_corpus
from transduce.evaluation.denoising import denoise
from transduce.evaluation.evaluate import Evaluation, SystemOutput, evaluate, find_metric, line_statistics, metric_class
from transduce.evaluation.pair_scores import scored_text, sum_scores
from transduce.evaluation.significance import paired_bootstrap, verdict
from transduce.flow import Example
from transduce.inference import Model
from transduce.recipe import Corpora, EvaluationRecipe


@dataclass(frozen=True)
class HeldOutExample:
    """One source with its references; of continuous text, one block."""

    source: str
    references: tuple[str, ...]
    file: str = ""


def group_references(examples: Sequence[Example], settings: EvaluationRecipe) -> list[HeldOutExample]:
    """One held-out example for each example, or for each source if equal sources share their references."""
    if settings.references == "each" or not any(example.source for example in examples):
        return [HeldOutExample(example.source, (example.target or "",), example.file) for example in examples]
    references: dict[str, list[str]] = {}
    for example in examples:
        references.setdefault(example.source, []).append(example.target or "")
    return [HeldOutExample(source, tuple(targets)) for source, targets in references.items()]


def read_corpora(corpora: Corpora, model: Model) -> list[Example]:
    return [example for corpus in corpora for example in read_corpus(corpus, model.recipe.data.invalid)]


def load_held_out(model: Model, data: str | None) -> tuple[str, list[HeldOutExample]]:
    """The given file, else the test set of the run, else its development set; with a name for the report."""
    settings = model.recipe
    if data is not None:
        name, examples = data, read_corpora(settings.data.held_out(data), model)
    elif settings.data.test:
        name, examples = "test", read_corpora(settings.data.test, model)
    else:
        name, examples = "dev", prepare_data(settings, (model.source, model.target)).dev_examples()
    return name, group_references(examples, settings.evaluation)


def predict(model: Model, examples: Sequence[HeldOutExample], metrics: Sequence[str], **settings: Any) -> SystemOutput:
    """The output that these metrics need: generated texts, log-probabilities of the references, embeddings."""
    if model.recipe.data.noise is not None:
        return denoise(model, [example.references[0] for example in examples], **settings)
    kinds = [metric_class(name) for name in metrics]
    texts = scored = None
    if any(issubclass(kind, TextMetric) for kind in kinds):
        texts = [one.text for one in model.generate([example.source for example in examples], **settings)]
    if any(issubclass(kind, ScoreMetric) for kind in kinds):
        scored = score_references(model, examples)
    embedded = embed_pairs(model, examples) if any(issubclass(kind, VectorMetric) for kind in kinds) else None
    return SystemOutput(texts, scored, embedded)


def embed_pairs(model: Model, examples: Sequence[HeldOutExample]) -> EmbeddedCorpus:
    """Sources as queries and the distinct references as documents."""
    documents = list(dict.fromkeys(text for example in examples for text in example.references))
    row_of = {text: row for row, text in enumerate(documents)}
    right = [[row_of[text] for text in example.references] for example in examples]
    return EmbeddedCorpus(model.embed([example.source for example in examples]), model.embed(documents), right)


def score_references(model: Model, examples: Sequence[HeldOutExample]) -> list[ScoredText]:
    """Log-probabilities of the references: one entry for each example, or for each block of continuous text."""
    if model.running:
        files = [[one.references[0] for one in group] for _, group in groupby(examples, lambda one: one.file)]
        return [scored for blocks in files for scored in model.score_running(blocks)]
    pairs = [(example.source, reference) for example in examples for reference in example.references]
    scores = (scored_text(one, target) for (_, target), one in zip(pairs, model.score(pairs), strict=True))
    return [sum_scores(list(islice(scores, len(example.references)))) for example in examples]


def evaluate_output(model: Model, examples: Sequence[HeldOutExample], output: SystemOutput) -> Evaluation:
    """The evaluation of a system output with the metrics of the run."""
    settings = model.recipe.evaluation
    lengths = None
    if not model.sourceless:
        # A denoising model has no source: the length is that of the text.
        lengths = model.source_encoding.lengths([example.source or example.references[0] for example in examples])
    references = [example.references for example in examples]
    return evaluate(output, references, lengths, settings.metrics, settings.resamples)


def compare_outputs(
    model: Model, examples: Sequence[HeldOutExample], outputs: Mapping[str, SystemOutput]
) -> dict[str, str]:
    """The verdict of a paired bootstrap test between two systems on the same lines, for each metric."""
    settings = model.recipe.evaluation
    references = [example.references for example in examples]
    first, second = outputs
    verdicts = {}
    for metric in map(find_metric, settings.metrics):
        a, b = (line_statistics(metric, outputs[name], references) for name in (first, second))
        result = paired_bootstrap(metric, a, b, settings.resamples, seed=1)
        verdicts[metric.name] = verdict(result, (first, second))
    return verdicts
