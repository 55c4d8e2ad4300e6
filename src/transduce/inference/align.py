"""Word alignment of given pairs by the cross-attention of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transduce.data.readers.corpus import read_corpus, read_lines
from transduce.errors import InputError
from transduce.explain.alignment import (
    GoldAlignment,
    Link,
    Symmetrisation,
    alignment_error_rate,
    links,
    parse_pharaoh,
    symmetrise,
)
from transduce.explain.attention_map import to_words
from transduce.inference import Model

Pair = tuple[str, str]


@dataclass(frozen=True)
class View:
    """Which attention is looked at: of one layer or head, or the mean of them."""

    layer: Any = "mean"  # a number, mean or last
    head: Any = "mean"


def align(model: Model, pairs: Sequence[Pair], view: View | None = None) -> list[list[Link]]:
    """(source word, target word) of each pair: every target word with the source word it is written looking at."""
    view = view or View()
    found: list[list[Link]] = [[] for _ in pairs]  # a pair with an empty side has no links
    busy = [place for place, pair in enumerate(pairs) if pair[0].strip() and pair[1].strip()]
    for place, explained in zip(busy, model.explain_pairs([pairs[place] for place in busy]), strict=True):
        found[place] = links(to_words(explained.map(view.layer, view.head)))
    return found


def align_both(
    model: Model, back: Model, pairs: Sequence[Pair], how: Symmetrisation, view: View | None = None
) -> list[list[Link]]:
    """The links of two models, the second of which goes from target to source, made into one set."""
    forward = align(model, pairs, view)
    backward = align(back, [(target, source) for source, target in pairs], view)
    turned = [[(source, target) for target, source in one] for one in backward]
    return [symmetrise(one, other, how) for one, other in zip(forward, turned, strict=True)]


def read_pairs(model: Model, file: str, chunk: int = 2000) -> Iterator[list[Pair]]:
    """The pairs of a file, many at a time: enough to sort by length, few enough to stream."""
    (corpus,) = model.recipe.data.held_out(file)
    examples = read_corpus(corpus, model.recipe.data.invalid)
    while some := list(islice(examples, chunk)):
        yield [(example.source, example.target or "") for example in some]


def read_gold(file: str) -> list[GoldAlignment]:
    return [parse_pharaoh(line, f"{file}:{number}") for number, line in enumerate(read_lines(file), 1)]


def error_rate(found: Sequence[Sequence[Link]], gold: Sequence[GoldAlignment], where: str) -> float:
    """Alignment error rate over all pairs (Och & Ney 2003), from 0 to 1."""
    if len(found) != len(gold):
        raise InputError(f"{len(found):,} pairs but {len(gold):,} lines of links", where=where, remedy="one a pair")
    predicted = {(number, *link) for number, line in enumerate(found) for link in line}
    sure = {(number, *link) for number, line in enumerate(gold) for link in line.sure}
    possible = {(number, *link) for number, line in enumerate(gold) for link in line.possible}
    return alignment_error_rate(predicted, sure, possible)
