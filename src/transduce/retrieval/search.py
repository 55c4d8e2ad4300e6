"""Vectors of queries and of documents enter; the closest documents of each query leave, and the cosines of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError
from transduce.evaluation.retrieval_metrics import unit
from transduce.inference import Model
from transduce.recipe import parse

_CHUNK = 100_000  # documents compared at a time


@dataclass(frozen=True)
class Hit:
    """One document found: its row, counted from 0, and the cosine of its vector with that of the query."""

    row: int
    cosine: float


def nearest(queries: np.ndarray, documents: np.ndarray, top: int) -> list[list[Hit]]:
    """The `top` closest documents (M D) of each query (Q D), the closest first; of equals the earlier one."""
    one = unit(queries)
    best = np.full((len(one), 0), -np.inf, dtype=np.float32)  # Q K: the best so far
    rows = np.zeros((len(one), 0), dtype=np.int64)
    for start in range(0, len(documents), _CHUNK):
        some = unit(np.asarray(documents[start : start + _CHUNK]))
        best = np.concatenate((best, one @ some.T), 1)
        added = np.broadcast_to(np.arange(start, start + len(some)), (len(one), len(some)))
        rows = np.concatenate((rows, added), 1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :top]  # stable: the earlier one of equals stays first
        best, rows = np.take_along_axis(best, order, 1), np.take_along_axis(rows, order, 1)
    return [
        [Hit(int(row), float(cosine)) for row, cosine in zip(*found, strict=True)]
        for found in zip(rows, best, strict=True)
    ]


@dataclass(frozen=True)
class Likeness:
    """How close the two sentences of a pair are, and how close people found them, where that is known."""

    cosine: float
    gold: float | None


def compare_pairs(model: Model, pairs: str) -> Iterator[Likeness]:
    """Each line of a file of pairs; a third column, or a field `score`, is the gold similarity where there is one."""
    (corpus,) = parse({"data": {"test": pairs}}).data.test
    examples = list(read_corpus(corpus, model.recipe.data.invalid))
    texts = [[example.source for example in examples], [example.target or "" for example in examples]]
    one, other = (unit(model.embed(side)) for side in texts)
    golds = [_gold(example.extra, f"{example.file}:{example.line}") for example in examples]
    if len({gold is None for gold in golds}) > 1:
        line = examples[golds.index(None)].line
        raise InputError("some lines have a gold similarity, this one has none", where=f"{pairs}:{line}")
    for cosine, gold in zip((one * other).sum(-1).tolist(), golds, strict=True):
        yield Likeness(cosine, gold)


def _gold(extra: Mapping[str, str], where: str) -> float | None:
    """The third column of a TSV, or the field `score`."""
    value = extra.get("column3", extra.get("score"))
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        remedy = "sentence TAB sentence TAB similarity"
        raise InputError(f"{value!r} is no number", where=where, remedy=remedy) from None
