"""Clean ids and a seed enter; damaged ids leave, for a model that learns to restore what was there (Lewis 2020)."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence


def delete_tokens(ids: Sequence[int], *, rate: float, seed: int) -> list[int]:
    """Each token is left out with probability `rate`: the model must also find out where."""
    chance = random.Random(seed)
    return [token for token in ids if chance.random() >= rate]


def mask_spans(ids: Sequence[int], *, rate: float, mask: int, seed: int, mean: float = 3.0) -> list[int]:
    """A share `rate` of the tokens goes, in spans of Poisson(`mean`) tokens, each span for one `mask`.

    A span of no token puts a mask between two: the model must also find out how many are missing. Two masks never
    stand side by side.
    """
    chance = random.Random(seed)
    gone = round(rate * len(ids))
    spans = _lengths(gone, mean, chance)
    kept = len(ids) - gone
    starts = sorted(chance.sample(range(kept + 1), min(len(spans), kept + 1)))  # a span before the n-th kept token
    if len(spans) > len(starts):  # more spans than places between the kept tokens: the last one is made longer
        spans = [*spans[: len(starts) - 1], sum(spans[len(starts) - 1 :])]
    result: list[int] = []
    read, before = 0, 0
    for start, length in zip(starts, spans, strict=True):
        result += [*ids[read : read + start - before], mask]
        read, before = read + start - before + length, start
    return [*result, *ids[read:]]


def permute_parts(ids: Sequence[int], *, ends: Collection[int], seed: int) -> list[int]:
    """Parts (sentences, clauses), each closed by one of the tokens `ends`, in random order."""
    parts: list[list[int]] = [[]]
    for token in ids:
        parts[-1].append(token)
        if token in ends:
            parts.append([])
    random.Random(seed).shuffle(parts)
    return [token for part in parts for token in part]


def _lengths(total: int, mean: float, chance: random.Random) -> list[int]:
    """Draws that add up to the total; the last one is cut to fit. The mean must be above 0."""
    lengths: list[int] = []
    left = total
    while left:
        lengths.append(min(left, _poisson(mean, chance)))
        left -= lengths[-1]
    return lengths


def _poisson(mean: float, chance: random.Random) -> int:
    """Events until the waiting times (exponential, a product of uniform draws) pass 1 (Knuth)."""
    events, product, end = 0, chance.random(), math.exp(-mean)
    while product > end:
        events, product = events + 1, product * chance.random()
    return events
