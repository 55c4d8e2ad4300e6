"""Log-probability and perplexity of given pairs and texts, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transduce.contracts import ScoredText, ScoreMetric
from transduce.data.readers.corpus import read_corpus
from transduce.evaluation.perplexity import CharacterPerplexity, Perplexity, WordPerplexity
from transduce.inference import Model, PairScore
from transduce.storage import json_line

PERPLEXITIES: dict[str, type[ScoreMetric]] = {
    "token": Perplexity,
    "word": WordPerplexity,
    "character": CharacterPerplexity,
}


@dataclass(frozen=True)
class ScoredLine:
    """One output line of `transduce score`, and the numbers it was made from."""

    line: str
    scored: ScoredText


def score_file(model: Model, file: str, *, as_json: bool, chunk: int = 2000) -> Iterator[ScoredLine]:
    """The score of each pair or line of a file; of continuous text, one score for the whole file."""
    (corpus,) = model.recipe.data.held_out(file)
    examples = read_corpus(corpus, model.recipe.data.invalid)
    if model.running:
        yield _whole_file(sum_scores(model.score_running([example.target or "" for example in examples])), as_json)
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
