"""Reranking of hypotheses: minimum Bayes risk, noisy channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from transduce.decoding.strategies import Utility
from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.inference.model import Model
    from transduce.inference.prediction import Prediction

ORDER, BETA = 6, 2.0  # character n-grams and weight of recall in chrF (Popović 2015), as in sacrebleu


def rank_by_utility(candidates: Sequence[str], utility: Utility, *, aggregate: bool = False) -> list[int]:
    """The indices of the candidates by expected utility, best first; every candidate is a pseudo-reference."""
    return [int(index) for index in np.argsort(-expected_utilities(candidates, utility, aggregate), kind="stable")]


def expected_utilities(candidates: Sequence[str], utility: Utility, aggregate: bool = False) -> np.ndarray:
    """The mean utility of each candidate against all of them. Equal texts are scored once."""
    counts = Counter(candidates)
    distinct = list(counts)
    weights = np.array([counts[text] for text in distinct], dtype=float) / len(candidates)
    if utility == "bleu":
        means = _bleu_matrix(distinct) @ weights
    else:
        ngrams = [character_ngrams(text) for text in distinct]
        if aggregate:
            mean = mean_ngrams(ngrams, weights)
            means = np.array([chrf(one, mean) for one in ngrams])
        else:
            means = np.array([[chrf(one, other) for other in ngrams] for one in ngrams]) @ weights
    value_of = dict(zip(distinct, means, strict=True))
    return np.array([value_of[text] for text in candidates])


NgramCounts = list[Mapping[str, float]]  # by order


def character_ngrams(text: str) -> NgramCounts:
    """Counts of the character n-grams of each order; white space is left out."""
    letters = "".join(text.split())
    return [
        Counter(letters[start : start + size] for start in range(len(letters) - size + 1))
        for size in range(1, ORDER + 1)
    ]


def mean_ngrams(rows: Sequence[NgramCounts], weights: np.ndarray) -> NgramCounts:
    """The weighted mean of the counts: one reference that stands for all."""
    means: list[dict[str, float]] = [{} for _ in range(ORDER)]
    for row, weight in zip(rows, weights, strict=True):
        for mean, counts in zip(means, row, strict=True):
            for ngram, count in counts.items():
                mean[ngram] = mean.get(ngram, 0.0) + float(weight) * count
    return list(means)


def chrf(hypothesis: NgramCounts, reference: NgramCounts) -> float:
    """chrF of a sentence: the F score of the mean precision and the mean recall of the orders that both texts have."""
    precisions, recalls = [], []
    for own, other in zip(hypothesis, reference, strict=True):
        if not own or not other:
            continue
        matches = sum(min(count, other.get(ngram, 0.0)) for ngram, count in own.items())
        precisions.append(matches / sum(own.values()))
        recalls.append(matches / sum(other.values()))
    if not precisions or not sum(precisions):
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 100 * (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def _bleu_matrix(texts: Sequence[str]) -> np.ndarray:
    """BLEU of each sentence against each other one, with the orders that a hypothesis has."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(effective_order=True, force=True)
    return np.array([[scorer.sentence_score(one, [other]).score for other in texts] for one in texts])


def rerank_noisy_channel(
    predictions: Sequence[Prediction],
    *,
    reverse: Model | None = None,
    language_model: Model | None = None,
    weights: tuple[float, float] = (1.0, 1.0),
) -> list[Prediction]:
    """Sorts the n-best list of each prediction by log p(y|x) + a log p(x|y) + b log p(y), each per token (Yee 2019).

    `reverse` translates targets to sources, `language_model` knows the target language; a, b are the `weights`. The
    parts of a long source are reranked one by one.
    """
    if reverse is None and language_model is None:
        raise InputError("noisy-channel reranking needs a model", remedy="give a reverse model or a language model")
    if language_model is not None and not language_model.sourceless:
        raise InputError("not a language model", remedy="train one with --task lm")
    whole = [part for one in predictions for part in one.parts or (one,)]
    found = iter(_rerank(whole, reverse, language_model, weights))
    return [one.of_line(one.source, [next(found) for _ in one.parts or (one,)]) for one in predictions]


def _rerank(
    predictions: Sequence[Prediction], reverse: Model | None, language_model: Model | None, weights: tuple[float, float]
) -> list[Prediction]:
    hypotheses = [one for prediction in predictions for one in prediction.nbest]
    if not hypotheses:
        return list(predictions)
    totals = np.array([one.score / max(len(one.token_scores), 1) for one in hypotheses])
    if reverse is not None:
        totals = totals + weights[0] * _scores(reverse, [(one.text, one.source) for one in hypotheses])
    if language_model is not None:
        totals = totals + weights[1] * _scores(language_model, [("", one.text) for one in hypotheses])
    index, found = 0, []
    for prediction in predictions:
        values, size = totals[index : index + len(prediction.nbest)], len(prediction.nbest)
        order = np.argsort(-values, kind="stable")
        found.append(_reordered(prediction, [int(one) for one in order]) if size else prediction)
        index += size
    return found


def _scores(model: Model, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Log-probability per token."""
    return np.array([one.score / max(len(one.token_scores), 1) for one in model.score(pairs)])


def _reordered(prediction: Prediction, order: list[int]) -> Prediction:
    """The prediction with its n-best list in this order. Its attention belongs to the first hypothesis."""
    hypotheses = tuple(prediction.nbest[index] for index in order)
    if order[0] == 0:
        return replace(prediction, nbest=hypotheses)
    return replace(hypotheses[0], source=prediction.source, nbest=hypotheses)
