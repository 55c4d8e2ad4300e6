"""Evaluation of a model on held-out data: system output, denoising, given pairs, paired tests, latency.

A delay g(t) is the number of source tokens that had been read when output token t was written, from t = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal

import numpy as np
import torch

from transduce.contracts import EmbeddedCorpus, ScoredText, ScoreMetric, TextMetric, VectorMetric
from transduce.data.annotations import CONTEXT, without_context
from transduce.data.batching import batch_by_length, collate
from transduce.data.languages import split_language
from transduce.data.noise import add_noise
from transduce.data.prepare import prepare_data
from transduce.data.readers.corpus import example_characters, gold_similarity, in_windows, read_corpus
from transduce.data.tokenizers.tokenizer import MASK, Tokenizer
from transduce.decoding.search import score
from transduce.errors import InputError
from transduce.evaluation.calibration import MIN_LINES, Calibration, fit_calibration
from transduce.evaluation.evaluate import (
    CharacterPerplexity,
    Evaluation,
    MetricSpec,
    NoisedInput,
    Perplexity,
    SystemOutput,
    WordPerplexity,
    evaluate,
    find_metric,
    line_statistics,
    metric_class,
)
from transduce.evaluation.significance import paired_bootstrap, verdict
from transduce.explain.failures import count_warnings
from transduce.flow import SPECIALS, UNK, Batch, Example
from transduce.inference import Model, PairScore
from transduce.inference.generation import located_errors, warn_of_cuts
from transduce.inference.streaming import simulate_alignatt, simulate_wait_k
from transduce.recipe import Corpora, EvaluationRecipe, GenerationRecipe, build
from transduce.recipe.compatibility import gives_vectors
from transduce.storage import json_line

PERPLEXITIES: dict[str, type[ScoreMetric]] = {
    "token": Perplexity,
    "word": WordPerplexity,
    "character": CharacterPerplexity,
}


def average_lagging(delays: Sequence[int], source_length: int) -> float:
    """AL = 1/tau sum_{t=1}^{tau} g(t) - (t - 1) / gamma, gamma = |y| / |x|, tau the first t with g(t) = |x|

    (Ma et al. 2019). Source tokens by which the output lags behind one that keeps pace with the source.
    """
    rate = len(delays) / source_length
    last = next((t for t, delay in enumerate(delays) if delay >= source_length), len(delays) - 1)
    return sum(delay - t / rate for t, delay in enumerate(delays[: last + 1])) / (last + 1)


def average_proportion(delays: Sequence[int], source_length: int) -> float:
    """AP = 1 / (|x| |y|) sum_t g(t) (Cho and Esipova 2016): the share of the source that the mean token has read"""
    return sum(delays) / (source_length * len(delays))


def differentiable_average_lagging(delays: Sequence[int], source_length: int) -> float:
    """DAL = 1/|y| sum_t g'(t) - (t - 1) / gamma, g'(t) = max(g(t), g'(t - 1) + 1 / gamma) (Cherry and Foster 2019)

    Every token takes the time 1 / gamma, so that tokens written at once after the end of the source count too.
    """
    pace, total, previous = source_length / len(delays), 0.0, 0.0
    for t, delay in enumerate(delays):
        previous = float(delay) if t == 0 else max(float(delay), previous + pace)
        total += previous - t * pace
    return total / len(delays)


LATENCIES: dict[str, Callable[[Sequence[int], int], float]] = {
    "average_lagging": average_lagging,
    "average_proportion": average_proportion,
    "differentiable_average_lagging": differentiable_average_lagging,
}


def mean_latencies(delays: Sequence[Sequence[int]], source_lengths: Sequence[int]) -> dict[str, float]:
    """The mean of each measure over all lines with an output."""
    lines = [(own, length) for own, length in zip(delays, source_lengths, strict=True) if own and length]
    return {
        name: float(np.mean([measure(own, length) for own, length in lines])) if lines else 0.0
        for name, measure in LATENCIES.items()
    }


@dataclass(frozen=True)
class ScoredLine:
    """One output line of `transduce score`, and the numbers it was made from."""

    line: str
    scored: ScoredText


def score_file(model: Model, file: str, *, as_json: bool, **settings: Any) -> Iterator[ScoredLine]:
    """The score of each pair or line of a file; of continuous text, one score for the whole file."""
    (corpus,) = model.recipe.data.held_out(file)
    examples = read_corpus(corpus, model.recipe.data.invalid)
    if model.running:
        yield _whole_file(sum_scores(model.score_running([example.target or "" for example in examples])), as_json)
        return
    for some in in_windows(examples, example_characters):
        pairs = [(example.source, example.target or "") for example in some]
        with located_errors(some):
            scores = model.score(pairs, **settings)
        for one, (_, target) in zip(scores, pairs, strict=True):
            content = {
                "score": one.score,
                "perplexity": one.perplexity,
                "tokens": one.tokens,
                "token_scores": one.token_scores,
            }
            line = json_line(content) if as_json else f"{one.score:.6f}\t{one.perplexity:.6g}"
            yield ScoredLine(line, scored_text(one, target))


def _whole_file(scored: ScoredText, as_json: bool) -> ScoredLine:
    value = perplexities([scored])["token"]
    content = {"score": scored.log_probability, "perplexity": value, "tokens": scored.tokens}
    return ScoredLine(json_line(content) if as_json else f"{scored.log_probability:.6f}\t{value:.6g}", scored)


def scored_text(one: PairScore, text: str) -> ScoredText:
    """The score of a text with its numbers of tokens, words and characters; </s> counts as one of each."""
    return ScoredText(one.score, len(one.token_scores), len(text.split()) + 1, len(text) + 1)


def sum_scores(parts: Sequence[ScoredText]) -> ScoredText:
    return ScoredText(
        sum(one.log_probability for one in parts),
        sum(one.tokens for one in parts),
        sum(one.words for one in parts),
        sum(one.characters for one in parts),
    )


def perplexities(scored: Sequence[ScoredText]) -> dict[str, float]:
    """Perplexity per token, word and character."""
    metrics = {unit: kind() for unit, kind in PERPLEXITIES.items()}
    return {unit: metric.value(metric.statistics(scored).sum(0)) for unit, metric in metrics.items()}


@dataclass(frozen=True)
class RestoredText:
    """The restoration of one noised text."""

    source: str  # noised, for display
    output: str
    reference: str
    scored: ScoredText


def denoise(model: Model, texts: Sequence[str], **settings: Any) -> SystemOutput:
    """Adds the noise of the run to each text, the same at every call, and restores the text with the model.

    Where the loss covers only some tokens (masked language models), only these are predicted and scored: the output
    is the most probable token of each position, separated by spaces. Otherwise the whole text is generated.
    """
    noise = build.build_noise(model.recipe.data.noise, model.target)
    assert noise is not None, "this run has no noise"
    ids, restored = model.target.encode_batch(texts), dict[int, RestoredText]()
    generation = model.settings(**settings)
    for rows in batch_by_length([len(one) for one in ids], generation.batch_tokens):
        clean = collate([(ids[row], ids[row]) for row in rows], rows)
        batch = add_noise(clean, noise, model.recipe.training.seed).to(model.device)
        if batch.loss_mask is None:
            part = _generate_texts(model, batch, [texts[row] for row in rows], generation)
        else:
            part = _predict_masked_tokens(model, batch)
        restored.update(zip(rows, part, strict=True))
    lines = [restored[row] for row in range(len(texts))]
    return SystemOutput(
        [line.output for line in lines],
        [line.scored for line in lines],
        noised=NoisedInput([line.source for line in lines], [[line.reference] for line in lines]),
    )


@torch.inference_mode()
def _predict_masked_tokens(model: Model, batch: Batch) -> list[RestoredText]:
    best, labels = model.network(batch).logits.argmax(-1), batch.labels
    result = []
    for row, scores in enumerate(score(model.network, batch)):
        predicted = labels.mask[row]
        output, reference = (
            token_pieces(model.target, part[row][predicted].tolist()) for part in (best, labels.values)
        )
        scored = ScoredText(sum(scores), len(scores), len(scores), sum(map(len, reference)))
        source = _noised_text(model.source, batch, row)
        result.append(RestoredText(source, " ".join(output), " ".join(reference), scored))
    return result


def _generate_texts(
    model: Model, batch: Batch, texts: Sequence[str], generation: GenerationRecipe
) -> list[RestoredText]:
    assert batch.source is not None
    sources = [row[real][:-1].tolist() for row, real in zip(batch.source.values, batch.source.mask, strict=True)]
    hypotheses = model.searcher.search_sources(sources, None, generation, batch.rows)
    result = []
    for row, (text, scores) in enumerate(zip(texts, score(model.network, batch), strict=True)):
        output = model.target.decode(hypotheses[row][0].text_ids)
        scored = ScoredText(sum(scores), len(scores), len(text.split()) + 1, len(text) + 1)
        result.append(RestoredText(_noised_text(model.source, batch, row), output, text, scored))
    return result


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The tokens as strings, with white space replaced by `▁`."""
    return ["".join("▁" if letter.isspace() else letter for letter in tokenizer.piece(one)) for one in ids]


def _noised_text(tokenizer: Tokenizer, batch: Batch, row: int) -> str:
    assert batch.source is not None
    ids = batch.source.values[row][batch.source.mask[row]].tolist()[:-1]
    return tokenizer.decode(ids).replace(SPECIALS[UNK], MASK)


@dataclass(frozen=True)
class HeldOutExample:
    """One source with its references; of continuous text, one block."""

    source: str
    references: tuple[str, ...]
    file: str = ""
    similarity: float | None = None  # of source and reference, where `spearman` is measured
    context: bool = False  # whether the last part of the source is the context of its document

    @property
    def sentence(self) -> str:
        """The source without its context."""
        return without_context(self.source) if self.context else self.source


def group_references(examples: Sequence[Example], settings: EvaluationRecipe) -> list[HeldOutExample]:
    """One held-out example for each example, or for each source if equal sources share their references."""
    if "spearman" in settings.metrics:
        return [
            HeldOutExample(example.source, (example.target or "",), example.file, gold_similarity(example))
            for example in examples
        ]
    context = any(CONTEXT in example.extra for example in examples)
    if settings.references == "each" or not any(example.source for example in examples):
        return [
            HeldOutExample(example.source, (example.target or "",), example.file, context=context)
            for example in examples
        ]
    references: dict[str, list[str]] = {}
    for example in examples:
        references.setdefault(example.source, []).append(example.target or "")
    return [HeldOutExample(source, tuple(targets), context=context) for source, targets in references.items()]


def sources_for(model: Model, examples: Sequence[HeldOutExample]) -> list[str]:
    """The sources as this model reads them: with the context of the document, or without."""
    context = model.recipe.data.context > 0
    if context and not all(example.context for example in examples):
        remedy = "name the run with data.context first: the data are read as it reads them"
        raise InputError("this model reads the context of each sentence, and the data have none", remedy=remedy)
    return [example.source if context else example.sentence for example in examples]


def empty_contexts(model: Model, examples: Sequence[HeldOutExample]) -> list[HeldOutExample]:
    """The examples as if each sentence were a document of its own."""
    if not model.recipe.data.context:
        remedy = "name a run that was trained with data.context"
        raise InputError("this model reads no context", where="--without-context", remedy=remedy)
    return [replace(example, source=f"{example.sentence}\t") for example in examples]


def read_corpora(corpora: Corpora, model: Model) -> list[Example]:
    return [example for corpus in corpora for example in read_corpus(corpus, model.recipe.data.invalid)]


def load_held_out(model: Model, data: str | None, language: str | None = None) -> tuple[str, list[HeldOutExample]]:
    """The given file, else the test set of the run, else its development set; with a name for the report."""
    settings = model.recipe
    if data is not None:
        name, examples = data, read_corpora(settings.data.held_out(data, language), model)
    elif settings.data.test:
        name, examples = "test", read_corpora(settings.data.test, model)
    else:
        name, examples = "dev", prepare_data(settings, (model.source, model.target)).dev_examples()
    return name, group_references(examples, settings.evaluation)


def predict(
    model: Model,
    examples: Sequence[HeldOutExample],
    metrics: Sequence[MetricSpec],
    *,
    detect: bool = False,
    **settings: Any,
) -> SystemOutput:
    """The output that these metrics need: generated texts, log-probabilities of the references, embeddings.

    `detect`: warnings of generated texts are counted.
    """
    if model.recipe.data.noise is not None:
        return denoise(model, [example.references[0] for example in examples], **settings)
    kinds = [metric_class(name) for name in metrics]
    texts = scored = token_scores = warnings = None
    if any(issubclass(kind, TextMetric) for kind in kinds):
        sources = sources_for(model, examples)
        predictions = model.generate(sources, **settings)
        texts, token_scores = [one.text for one in predictions], [one.token_scores for one in predictions]
        cuts = [one.source_cut for one in predictions]
        warn_of_cuts(sources, cuts, model.max_source_tokens(**settings))
        if detect:
            model.explain_predictions([] if model.sourceless else predictions)  # in batches
            warnings = count_warnings([one.warnings for one in predictions])
    if any(issubclass(kind, ScoreMetric) for kind in kinds):
        scored = score_references(model, examples, **settings)
    embedded = embed_pairs(model, examples) if any(issubclass(kind, VectorMetric) for kind in kinds) else None
    plain = [split_language(one.sentence)[1] for one in examples]
    return SystemOutput(texts, scored, embedded, token_scores, sources=plain, warnings=warnings)


def predict_simultaneous(
    model: Model, examples: Sequence[HeldOutExample], policy: Literal["wait_k", "alignatt"], limit: int, **settings: Any
) -> tuple[SystemOutput, dict[str, float]]:
    """Outputs of simultaneous translation, and their mean latencies; `limit` is k, or the last tokens of AlignAtt."""
    sources = [example.source for example in examples]
    simulate = simulate_wait_k if policy == "wait_k" else simulate_alignatt
    found = simulate(model, sources, limit, **settings)
    latencies = mean_latencies([one.delays for one in found], [one.source_length for one in found])
    scores = [one.token_scores for one in found]
    plain = [split_language(source)[1] for source in sources]
    kinds = [metric_class(name) for name in model.recipe.evaluation.metrics]
    needed = any(issubclass(kind, ScoreMetric) for kind in kinds)
    scored = score_references(model, examples, **settings) if needed else None
    return SystemOutput([one.text for one in found], scored, token_scores=scores, sources=plain), latencies


def calibrate(model: Model, data: str | None = None, **settings: Any) -> Calibration:
    """Fits the confidence of a model on pairs, by default its development set; the model has it from then on."""
    if model.sourceless or model.recipe.data.noise is not None or gives_vectors(model.recipe.model):
        raise InputError(
            "confidence is for models that map a source to an output with a reference",
            where="calibrate",
            remedy="language models, denoising models and embeddings have none",
        )
    if data is None:
        examples = prepare_data(model.recipe, (model.source, model.target)).dev_examples()
    else:
        examples = read_corpora(model.recipe.data.held_out(data), model)
    lines = group_references(examples, model.recipe.evaluation)
    output = predict(model, lines, ["exact"], **settings)
    model.calibration = fit_calibration(output, [line.references for line in lines])
    if model.calibration is None:
        raise InputError(
            f"{len(lines)} lines are too few to calibrate on", where="calibrate", remedy=f"give {MIN_LINES} or more"
        )
    return model.calibration


def embed_pairs(model: Model, examples: Sequence[HeldOutExample]) -> EmbeddedCorpus:
    """Sources as queries and the distinct references as documents."""
    documents = list(dict.fromkeys(text for example in examples for text in example.references))
    row_of = {text: row for row, text in enumerate(documents)}
    right = [[row_of[text] for text in example.references] for example in examples]
    golds = [example.similarity for example in examples if example.similarity is not None]
    similarities = golds if len(golds) == len(examples) else None
    sources = [example.source for example in examples]
    return EmbeddedCorpus(model.embed(sources), model.embed_targets(documents), right, similarities)


def score_references(model: Model, examples: Sequence[HeldOutExample], **settings: Any) -> list[ScoredText]:
    """Log-probabilities of the references: one entry for each example, or for each block of continuous text."""
    if model.running:
        files = [[one.references[0] for one in group] for _, group in groupby(examples, lambda one: one.file)]
        return [scored for blocks in files for scored in model.score_running(blocks)]
    read = zip(sources_for(model, examples), examples, strict=True)
    pairs = [(source, reference) for source, example in read for reference in example.references]
    found = model.score(pairs, **settings)
    scores = (scored_text(one, target) for (_, target), one in zip(pairs, found, strict=True))
    return [sum_scores(list(islice(scores, len(example.references)))) for example in examples]


def evaluate_output(model: Model, examples: Sequence[HeldOutExample], output: SystemOutput) -> Evaluation:
    """The evaluation of a system output with the metrics of the run."""
    settings = model.recipe.evaluation
    lengths = None
    if not model.sourceless:
        # A denoising model has no source: the length is that of the text.
        sources = zip(sources_for(model, examples), examples, strict=True)
        lengths = model.source_encoding.lengths([source or example.references[0] for source, example in sources])
    references = [example.references for example in examples]
    return evaluate(output, references, lengths, settings.metrics, settings.resamples)


def evaluate_languages(model: Model, examples: Sequence[HeldOutExample], output: SystemOutput) -> dict[str, Evaluation]:
    """The evaluation of the lines of each language that sources are tagged with; empty for one language."""
    languages = [split_language(example.source)[0] if model.source.languages else None for example in examples]
    names = sorted({name for name in languages if name is not None})
    if len(names) < 2 or output.embedded is not None:
        return {}
    found = {}
    for name in names:
        rows = [row for row, language in enumerate(languages) if language == name]
        texts = None if output.texts is None else [output.texts[row] for row in rows]
        scored = None if output.scored is None else [output.scored[row] for row in rows]
        sources = None if output.sources is None else [output.sources[row] for row in rows]
        part = SystemOutput(texts, scored, sources=sources)
        found[name] = evaluate_output(model, [examples[row] for row in rows], part)
    return found


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
