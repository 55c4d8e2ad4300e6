"""Word alignment by attention: symmetrisation, the Pharaoh format, alignment error rate."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from transduce.data.readers.corpus import example_characters, in_windows, read_corpus, read_lines
from transduce.errors import InputError
from transduce.explain.attention import Explanation, Link, ReadAt, links, to_words
from transduce.inference import Model
from transduce.inference.generation import check_pairs, located_errors

Level = Literal["word", "token"]
Symmetrisation = Literal["intersection", "union", "grow-diag", "grow-diag-final-and"]


def symmetrise(forward: Iterable[Link], backward: Iterable[Link], how: Symmetrisation = "grow-diag") -> list[Link]:
    """Combines two directional alignments of one pair, both as (source, target) (Koehn, Och and Marcu 2003)."""
    first, second = set(forward), set(backward)
    if how == "intersection":
        return sorted(first & second)
    if how == "union":
        return sorted(first | second)
    result = _grow_diag(first & second, first | second)
    if how == "grow-diag-final-and":
        for link in [*sorted(first), *sorted(second)]:
            if link[0] not in {s for s, _ in result} and link[1] not in {t for _, t in result}:
                result.add(link)
    return sorted(result)


def _grow_diag(result: set[Link], union: set[Link]) -> set[Link]:
    """Adds links of the union next to existing ones, also diagonally, as long as they link a word without links."""
    neighbours = [(s, t) for s in (-1, 0, 1) for t in (-1, 0, 1) if (s, t) != (0, 0)]
    grown = True
    while grown:
        grown = False
        for source, target in sorted(result):
            for step in neighbours:
                link = (source + step[0], target + step[1])
                if link not in union or link in result:
                    continue
                if link[0] not in {s for s, _ in result} or link[1] not in {t for _, t in result}:
                    result.add(link)
                    grown = True
    return result


def pharaoh(pairs: Iterable[Link]) -> str:
    """The Pharaoh format, `0-0 1-2`: sorted source-target links, counted from 0."""
    return " ".join(f"{source}-{target}" for source, target in sorted(set(pairs)))


@dataclass(frozen=True, slots=True)
class GoldAlignment:
    """A manual alignment: the sure links, and the possible links, which include the sure ones."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def parse_pharaoh(line: str, where: str = "") -> GoldAlignment:
    """Parses `0-0 1-2`; `1?2` or `1p2` is a possible link."""
    sure, possible = set(), set()
    for item in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", item)
        if not match:
            raise InputError(
                f"cannot read the link {item!r}", where=where, remedy="write 0-1, or 0?1 for a possible link"
            )
        link = (int(match[1]), int(match[3]))
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return GoldAlignment(frozenset(sure), frozenset(possible))


def alignment_error_rate(
    predicted: Collection[Hashable], sure: Collection[Hashable], possible: Collection[Hashable] = ()
) -> float:
    """1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|), from 0 to 1 (Och and Ney 2003); sure links are also possible.

    The rate of a corpus is computed from summed counts: pass the links of all lines at once, as (line, source, target).
    """
    a, s = set(predicted), set(sure)
    p = s | set(possible)
    return 1 - (len(a & s) + len(a & p)) / (len(a) + len(s)) if a or s else 0.0


Box = tuple[float, float, float, float]  # left, top, right, bottom


def share_in_box(explained: Explanation, token: int, box: Box, size: tuple[float, float]) -> float:
    """The share of the attention of a target token that lies in a box of its picture, `size` wide and high.

    A cell counts with the part of its area that is in the box, so uniform attention has the share of the box.
    """
    (scene,) = explained.visual_sources
    rows, columns = scene.grid
    weights = explained.map().weights[token, scene.begin : scene.begin + rows * columns].reshape(rows, columns)
    inside = [
        np.clip(np.minimum(np.arange(1, count + 1) * cell, high) - np.maximum(np.arange(count) * cell, low), 0, cell)
        / cell
        for count, cell, low, high in (
            (rows, size[1] / rows, box[1], box[3]),
            (columns, size[0] / columns, box[0], box[2]),
        )
    ]
    return float((weights * np.outer(*inside)).sum() / max(weights.sum(), 1e-12))


Pair = tuple[str, str]


@dataclass(frozen=True)
class AttentionSelection:
    """The attention to use: of one layer and head, or a mean of them, between words or between tokens."""

    layer: Any = "mean"  # a number, mean or last
    head: Any = "mean"
    level: Level = "word"
    read_at: ReadAt = "output"

    def links(self, explanation: Explanation) -> list[Link]:
        tokens = replace(explanation, read_at=self.read_at).map(self.layer, self.head)
        return links(to_words(tokens) if self.level == "word" else tokens)


def align(model: Model, pairs: Sequence[Pair], selection: AttentionSelection | None = None) -> list[list[Link]]:
    """Links each target word, or token, to that of the source with the largest attention weight: (source, target)."""
    if not isinstance(model, Model):
        raise InputError(f"align takes a loaded model, not {model!r}", remedy="write align(transduce.load(RUN), pairs)")
    pairs = check_pairs("align", pairs)
    selection = selection or AttentionSelection()
    result: list[list[Link]] = [[] for _ in pairs]  # a pair with an empty side has no links
    rows = [row for row, pair in enumerate(pairs) if pair[0].strip() and pair[1].strip()]
    for row, explanation in zip(rows, model.explain_pairs([pairs[row] for row in rows]), strict=True):
        result[row] = selection.links(explanation)
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
