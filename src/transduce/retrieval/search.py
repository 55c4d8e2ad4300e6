"""Nearest-neighbour search by cosine similarity, and the similarity of sentence pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from transduce.data.readers.corpus import gold_similarity, read_corpus
from transduce.data.readers.windows import in_windows
from transduce.errors import InputError
from transduce.evaluation.retrieval_metrics import normalise_rows
from transduce.inference import Model
from transduce.recipe import parse

_CHUNK = 100_000  # documents compared per matrix product


@dataclass(frozen=True)
class Hit:
    """A document in the result of a query: its row, counted from 0, and the cosine similarity."""

    row: int
    cosine: float


def nearest_neighbours(queries: np.ndarray, documents: np.ndarray, top: int) -> list[list[Hit]]:
    """The `top` documents (M D) most similar to each query (Q D), the best first; ties are won by the lower row."""
    queries = normalise_rows(queries)
    best = np.full((len(queries), 0), -np.inf, dtype=np.float32)  # Q K: the best cosines so far
    rows = np.zeros((len(queries), 0), dtype=np.int64)
    for start in range(0, len(documents), _CHUNK):
        chunk = normalise_rows(np.asarray(documents[start : start + _CHUNK]))
        best = np.concatenate((best, queries @ chunk.T), 1)
        new_rows = np.broadcast_to(np.arange(start, start + len(chunk)), (len(queries), len(chunk)))
        rows = np.concatenate((rows, new_rows), 1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :top]  # stable: among ties the lower row stays first
        best, rows = np.take_along_axis(best, order, 1), np.take_along_axis(rows, order, 1)
    return [
        [Hit(int(row), float(cosine)) for row, cosine in zip(*ranking, strict=True)]
        for ranking in zip(rows, best, strict=True)
    ]


@dataclass(frozen=True)
class PairSimilarity:
    """The cosine similarity of a sentence pair, and the gold similarity where there is one."""

    cosine: float
    gold: float | None


def pair_similarities(model: Model, pairs: str) -> Iterator[PairSimilarity]:
    """The similarity of each pair of a file. The gold similarity is the third column, or the field `score`."""
    (corpus,) = parse({"data": {"test": pairs}}).data.test
    examples = list(read_corpus(corpus, model.recipe.data.invalid))
    texts = [[example.source for example in examples], [example.target or "" for example in examples]]
    sides = zip((model.embed, model.embed_targets), texts, strict=True)
    blocks = ([embed(window) for window in in_windows(side)] for embed, side in sides)
    first, second = (normalise_rows(np.concatenate(side)) for side in blocks)
    golds = [gold_similarity(example) for example in examples]
    if len({gold is None for gold in golds}) > 1:
        line = examples[golds.index(None)].line
        raise InputError(
            "this line has no gold similarity, but other lines have one",
            where=f"{pairs}:{line}",
            remedy="give all lines a third column, or none",
        )
    for cosine, gold in zip((first * second).sum(-1).tolist(), golds, strict=True):
        yield PairSimilarity(cosine, gold)
