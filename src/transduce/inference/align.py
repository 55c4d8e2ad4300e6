"""Word alignment of given pairs by the cross-attention of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transduce.data.readers.corpus import read_corpus, read_lines
from transduce.data.readers.windows import example_characters, in_windows
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
from transduce.explain.attention import to_words
from transduce.inference import Model
from transduce.inference.generation import located_errors

Pair = tuple[str, str]


@dataclass(frozen=True)
class AttentionSelection:
    """The attention to use: of one layer and head, or a mean of them."""

    layer: Any = "mean"  # a number, mean or last
    head: Any = "mean"


def align(model: Model, pairs: Sequence[Pair], selection: AttentionSelection | None = None) -> list[list[Link]]:
    """Links each target word to the source word with the largest attention weight: (source word, target word)."""
    selection = selection or AttentionSelection()
    result: list[list[Link]] = [[] for _ in pairs]  # a pair with an empty side has no links
    rows = [row for row, pair in enumerate(pairs) if pair[0].strip() and pair[1].strip()]
    for row, explanation in zip(rows, model.explain_pairs([pairs[row] for row in rows]), strict=True):
        result[row] = links(to_words(explanation.map(selection.layer, selection.head)))
    return result


def align_both(
    model: Model,
    reverse: Model,
    pairs: Sequence[Pair],
    how: Symmetrisation,
    selection: AttentionSelection | None = None,
) -> list[list[Link]]:
    """The symmetrised links of two models; `reverse` maps from target to source."""
    forward = align(model, pairs, selection)
    backward = align(reverse, [(target, source) for source, target in pairs], selection)
    transposed = [[(source, target) for target, source in one] for one in backward]
    return [symmetrise(one, other, how) for one, other in zip(forward, transposed, strict=True)]


def align_file(
    model: Model, file: str, reverse: Model | None, how: Symmetrisation, selection: AttentionSelection | None = None
) -> Iterator[list[list[Link]]]:
    """The links of the pairs of a file, window by window; symmetrised where there is a model from target to source."""
    (corpus,) = model.recipe.data.held_out(file)
    for some in in_windows(read_corpus(corpus, model.recipe.data.invalid), example_characters):
        pairs = [(example.source, example.target or "") for example in some]
        with located_errors(some):
            if reverse is None:
                yield align(model, pairs, selection)
            else:
                yield align_both(model, reverse, pairs, how, selection)


def read_gold(file: str) -> list[GoldAlignment]:
    """The gold alignments of a file in the Pharaoh format."""
    return [parse_pharaoh(line, f"{file}:{number}") for number, line in enumerate(read_lines(file), 1)]


def error_rate(alignments: Sequence[Sequence[Link]], gold: Sequence[GoldAlignment], where: str) -> float:
    """Alignment error rate over all pairs (Och & Ney 2003), from 0 to 1."""
    if len(alignments) != len(gold):
        problem = f"{len(alignments):,} pairs but {len(gold):,} lines of links"
        raise InputError(problem, where=where, remedy="give one line of links per pair")
    predicted = {(number, *link) for number, line in enumerate(alignments) for link in line}
    sure = {(number, *link) for number, line in enumerate(gold) for link in line.sure}
    possible = {(number, *link) for number, line in enumerate(gold) for link in line.possible}
    return alignment_error_rate(predicted, sure, possible)
