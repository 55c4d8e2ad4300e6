"""Word alignment: links from attention, symmetrisation, the Pharaoh format, alignment error rate."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from transduce.errors import InputError
from transduce.explain.attention import AttentionMap
from transduce.modalities.source_encoding import NO_WORD

Link = tuple[int, int]  # (source position, target position), both from 0
Symmetrisation = Literal["intersection", "union", "grow-diag", "grow-diag-final-and"]


def links(attention: AttentionMap, threshold: float = 0.0) -> list[Link]:
    """Links each target position to the source position with the largest weight, if it reaches `threshold`.

    </s>, where it is in the map, acts as the empty word: positions that attend mostly to it get no link.
    """
    result = []
    for target, row in enumerate(attention.weights):
        if attention.target_words[target] == NO_WORD or not row.size:
            continue
        source = int(row.argmax())
        if attention.source_words[source] != NO_WORD and row[source] > 0 and row[source] >= threshold:
            result.append((source, target))
    return sorted(result)


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
