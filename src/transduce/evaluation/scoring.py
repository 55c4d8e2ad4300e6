"""A model and held-out texts in, judgements out: what metrics ask for, their scores, paired tests, probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch

from transduce import build
from transduce.contracts import Embedded, Scored, ScoreMetric, TextMetric, VectorMetric
from transduce.data.batching import batch_by_length, collate
from transduce.data.noise import add_noise
from transduce.data.prepare import prepare_data
from transduce.data.readers.corpus import read_corpus
from transduce.data.tokenizers.tokenizer import MASK, Tokenizer
from transduce.decoding.scoring import score
from transduce.evaluation import evaluate as evaluation
from transduce.evaluation.evaluate import Asked, Outputs
from transduce.flow import SPECIALS, UNK, Batch, Example
from transduce.inference import Model, PairScore
from transduce.recipe import Corpora, EvaluationRecipe, GenerationRecipe


@dataclass(frozen=True)
class Restored:
    """One text."""

    source: str  # damaged, for the eye
    output: str
    reference: str
    scored: Scored


def restore(model: Model, texts: Sequence[str], **settings: Any) -> Outputs:
    """Each text damaged as the run's noise does, in the same way every time, and restored.

    Where only some tokens are asked for, they alone are answered and judged: an output is their pieces with spaces
    between them, each the likeliest at its place. Else the whole text is written, by search.
    """
    noise = build.build_noise(model.recipe.data.noise, model.target)
    assert noise is not None, "this run damages nothing"
    ids, found = model.target.encode_batch(texts), dict[int, Restored]()
    chosen = model.settings(**settings)
    for rows in batch_by_length([len(one) for one in ids], chosen.batch_tokens):
        clean = collate([(ids[row], ids[row]) for row in rows], rows)
        batch = add_noise(clean, noise, model.recipe.training.seed).to(model.device)
        part = [texts[row] for row in rows]
        restored = _whole_restore(model, batch, part, chosen) if batch.loss_mask is None else _some(model, batch)
        found.update(zip(rows, restored, strict=True))
    lines = [found[row] for row in range(len(texts))]
    return Outputs(
        [line.output for line in lines],
        [line.scored for line in lines],
        asked=Asked([line.source for line in lines], [[line.reference] for line in lines]),
    )


@torch.inference_mode()
def _some(model: Model, batch: Batch) -> list[Restored]:
    best, gold = model.network(batch).logits.argmax(-1), batch.labels
    result = []
    for row, scores in enumerate(score(model.network, batch)):
        asked = gold.mask[row]
        said, right = (pieces(model.target, part[row][asked].tolist()) for part in (best, gold.values))
        scored = Scored(sum(scores), len(scores), len(scores), sum(map(len, right)))
        result.append(Restored(_damaged(model.source, batch, row), " ".join(said), " ".join(right), scored))
    return result


def _whole_restore(model: Model, batch: Batch, texts: Sequence[str], settings: GenerationRecipe) -> list[Restored]:
    assert batch.source is not None
    sources = [row[real][:-1].tolist() for row, real in zip(batch.source.values, batch.source.mask, strict=True)]
    found = model.searcher.sources(sources, None, settings, batch.rows)
    result = []
    for row, (text, scores) in enumerate(zip(texts, score(model.network, batch), strict=True)):
        output = model.target.decode(found[row][0].text_ids)
        scored = Scored(sum(scores), len(scores), len(text.split()) + 1, len(text) + 1)
        result.append(Restored(_damaged(model.source, batch, row), output, text, scored))
    return result


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Tokens as words: no white space within them."""
    return ["".join("▁" if letter.isspace() else letter for letter in tokenizer.piece(one)) for one in ids]


def _damaged(tokenizer: Tokenizer, batch: Batch, row: int) -> str:
    assert batch.source is not None
    ids = batch.source.values[row][batch.source.mask[row]].tolist()[:-1]
    return tokenizer.decode(ids).replace(SPECIALS[UNK], MASK)


@dataclass(frozen=True)
class Line:
    """One source and its right answers; of running text, a block of lines."""

    source: str
    references: tuple[str, ...]
    file: str = ""


def as_lines(examples: Sequence[Example], settings: EvaluationRecipe) -> list[Line]:
    """One line an example, or one line a source where several answers are right."""
    if settings.references == "each" or not any(example.source for example in examples):
        return [Line(example.source, (example.target or "",), example.file) for example in examples]
    answers: dict[str, list[str]] = {}
    for example in examples:
        answers.setdefault(example.source, []).append(example.target or "")
    return [Line(source, tuple(references)) for source, references in answers.items()]


def read_corpora(corpora: Corpora, model: Model) -> list[Example]:
    return [example for corpus in corpora for example in read_corpus(corpus, model.recipe.data.invalid)]


def held_out(model: Model, data: str | None) -> tuple[str, list[Line]]:
    """The named file; else the test set of the run; else what it held out of training."""
    settings = model.recipe
    if data is not None:
        name, examples = data, read_corpora(settings.data.held_out(data), model)
    elif settings.data.test:
        name, examples = "test", read_corpora(settings.data.test, model)
    else:
        name, examples = "dev", prepare_data(settings, (model.source, model.target)).dev_examples()
    return name, as_lines(examples, settings.evaluation)


def answer(model: Model, lines: Sequence[Line], metrics: Sequence[str], **settings: Any) -> evaluation.Outputs:
    """What these metrics ask for and no more: it generates for those of texts, scores for those of probabilities,
    embeds for those of vectors."""
    if model.recipe.data.noise is not None:
        return restore(model, [line.references[0] for line in lines], **settings)
    kinds = [evaluation.METRICS[name] for name in metrics]
    texts = scored = None
    if any(issubclass(kind, TextMetric) for kind in kinds):
        texts = [one.text for one in model.generate([line.source for line in lines], **settings)]
    if any(issubclass(kind, ScoreMetric) for kind in kinds):
        scored = score_references(model, lines)
    embedded = embed_sides(model, lines) if any(issubclass(kind, VectorMetric) for kind in kinds) else None
    return evaluation.Outputs(texts, scored, embedded)


def embed_sides(model: Model, lines: Sequence[Line]) -> Embedded:
    """Each source is a query, each different answer a document: a text that answers two lines is no rival of itself."""
    documents = list(dict.fromkeys(text for line in lines for text in line.references))
    row_of = {text: row for row, text in enumerate(documents)}
    right = [[row_of[text] for text in line.references] for line in lines]
    return Embedded(model.embed([line.source for line in lines]), model.embed(documents), right)


def score_references(model: Model, lines: Sequence[Line]) -> list[Scored]:
    """How probable the right answers are: one entry a line (all its answers together), or a passage of running text."""
    if model.running:
        files = [[line.references[0] for line in group] for _, group in groupby(lines, lambda line: line.file)]
        return [one for blocks in files for one in model.score_running(blocks)]
    pairs = [(line.source, reference) for line in lines for reference in line.references]
    found = (as_scored(one, target) for (_, target), one in zip(pairs, model.score(pairs), strict=True))
    return [_sum(list(islice(found, len(line.references)))) for line in lines]


def as_scored(one: PairScore, text: str) -> Scored:
    """Words and characters of the text, and one of each for its closing </s>."""
    return Scored(one.score, len(one.token_scores), len(text.split()) + 1, len(text) + 1)


def _sum(parts: Sequence[Scored]) -> Scored:
    return Scored(
        sum(one.log_probability for one in parts),
        sum(one.tokens for one in parts),
        sum(one.words for one in parts),
        sum(one.characters for one in parts),
    )


def score_outputs(model: Model, lines: Sequence[Line], outputs: evaluation.Outputs) -> evaluation.Evaluation:
    settings = model.recipe.evaluation
    lengths = None
    if not model.sourceless:
        sources = [line.source or line.references[0] for line in lines]  # a text is its own source
        lengths = model.reading.lengths(sources)
    references = [line.references for line in lines]
    return evaluation.evaluate(outputs, references, lengths, settings.metrics, settings.resamples)


def compare_outputs(model: Model, lines: Sequence[Line], outputs: Mapping[str, evaluation.Outputs]) -> dict[str, str]:
    """What a paired test says of two systems on the same lines, for each metric."""
    settings = model.recipe.evaluation
    (first, one), (second, other) = outputs.items()
    references = [line.references for line in lines]
    verdicts = {}
    for metric in map(evaluation.find, settings.metrics):
        a, b = (evaluation.statistics_of(metric, said, references) for said in (one, other))
        result = evaluation.paired(metric, a, b, settings.resamples, seed=1)
        verdicts[metric.name] = evaluation.verdict(result, (first, second))
    return verdicts


@dataclass(frozen=True)
class ScoredLine:
    """One line to write, and what it was made from."""

    written: str
    scored: Scored


def score_lines(model: Model, file: str, *, as_json: bool, chunk: int = 2000) -> Iterator[ScoredLine]:
    """The probability of each pair or line, or of a whole running text, with the line to write for it."""
    (corpus,) = model.recipe.data.held_out(file)
    examples = read_corpus(corpus, model.recipe.data.invalid)
    if model.running:
        yield _whole(_sum(model.score_running([example.target or "" for example in examples])), as_json)
        return
    while some := list(islice(examples, chunk)):
        pairs = [(example.source, example.target or "") for example in some]
        for one, (_, target) in zip(model.score(pairs), pairs, strict=True):
            content = {
                "score": one.score,
                "perplexity": one.perplexity,
                "tokens": one.tokens,
                "token_scores": one.token_scores,
            }
            written = json_line(content) if as_json else f"{one.score:.6f}\t{one.perplexity:.6g}"
            yield ScoredLine(written, as_scored(one, target))


def _whole(scored: Scored, as_json: bool) -> ScoredLine:
    value = perplexities([scored])["token"]
    content = {"score": scored.log_probability, "perplexity": value, "tokens": scored.tokens}
    return ScoredLine(json_line(content) if as_json else f"{scored.log_probability:.6f}\t{value:.6g}", scored)


def perplexities(scored: Sequence[Scored]) -> dict[str, float]:
    """Per token, word and character."""
    names = {"token": "perplexity", "word": "word_perplexity", "character": "character_perplexity"}
    found = {unit: evaluation.find(name) for unit, name in names.items()}
    return {
        unit: metric.value(metric.statistics(scored).sum(0))
        for unit, metric in found.items()
        if isinstance(metric, ScoreMetric)
    }


def single_line(text: str) -> str:
    """An output on one line: line breaks become spaces."""
    return text.replace("\r", " ").replace("\n", " ")


def json_line(content: Mapping[str, Any]) -> str:
    """JSON on one line, for every context: some take these three characters for the end of a line."""
    text = json.dumps(content, ensure_ascii=False)
    return text.translate({ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"})
