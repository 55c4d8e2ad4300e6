"""Attention weights enter; word-level maps, hard links, Pharaoh lines and alignment error rates leave."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from transduce.errors import InputError
from transduce.modalities.source_encoding import NO_WORD

Link = tuple[int, int]  # (source position, target position), both from 0
Symmetrisation = Literal["intersection", "union", "grow-diag", "grow-diag-final-and"]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """How much each target position looked at each source position, with the tokens and words they belong to."""

    weights: np.ndarray  # T S: each row sums to 1 (less where </s> was left out)
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    source_words: Sequence[int]  # token -> word, -1 for </s>
    target_words: Sequence[int]
    source_labels: Sequence[str] = field(default=())  # the words; by default their tokens joined
    target_labels: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        shape = (len(self.target_tokens), len(self.source_tokens))
        if self.weights.shape != shape:
            raise ValueError(
                f"weights of shape {self.weights.shape} for {shape[0]} target and {shape[1]} source tokens"
            )
        for side in ("source", "target"):
            tokens, words = getattr(self, f"{side}_tokens"), getattr(self, f"{side}_words")
            if len(tokens) != len(words):
                raise ValueError(f"{len(tokens)} {side} tokens but {len(words)} word numbers")
            if not getattr(self, f"{side}_labels"):
                object.__setattr__(self, f"{side}_labels", join_tokens(tokens, words))
            elif max(words, default=NO_WORD) >= len(getattr(self, f"{side}_labels")):
                raise ValueError(f"a {side} token belongs to a word that has no label")


def join_tokens(tokens: Sequence[str], words: Sequence[int]) -> list[str]:
    """Labels for words that came without: their tokens put together."""
    labels = [""] * (max(words, default=NO_WORD) + 1)
    for token, word in zip(tokens, words, strict=True):
        if word != NO_WORD:
            labels[word] += token
    return [label.strip("▁") or label for label in labels]  # the mark of a word's beginning in subword models


def combine(
    cross: np.ndarray, layer: int | Literal["mean", "last"] = "mean", head: int | Literal["mean"] = "mean"
) -> np.ndarray:
    """Attention of all layers and heads (L H T S) to one map (T S); a mean of rows that sum to 1 sums to 1."""
    if cross.ndim != 4 or 0 in cross.shape[:2]:
        raise InputError(
            "this model has no attention over the source",
            remedy="explain a model whose decoder attends, such as a recurrent one with a score, or a Transformer",
        )
    layers = cross.mean(0) if layer == "mean" else cross[_index("layer", layer, len(cross))]  # H T S
    return np.asarray(layers.mean(0) if head == "mean" else layers[_index("head", head, len(layers))])


def _index(name: str, value: int | str, count: int) -> int:
    position = count - 1 if value == "last" else value
    if not isinstance(position, int) or not -count <= position < count:
        raise InputError(f"no {name} {value!r}: there are {count}", remedy=f"0 to {count - 1}, or mean")
    return position


def to_words(tokens: AttentionMap, keep_end: bool = False) -> AttentionMap:
    """The same map between words: summed over the tokens of a source word, averaged over those of a target word.

    A source word's tokens share out one look, so they add; a target word's tokens are looks of their own, so they
    average. Tokens of no word make one last row and column when `keep_end`, and every row still sums to 1;
    otherwise they are dropped, and what a row lacks to 1 is what the model spent on them.
    """
    source, source_labels = _membership(tokens.source_words, tokens.source_tokens, tokens.source_labels, keep_end)
    target, target_labels = _membership(tokens.target_words, tokens.target_tokens, tokens.target_labels, keep_end)
    target = target / np.maximum(target.sum(0), 1)
    weights = target.T @ tokens.weights @ source
    sources, targets = _word_numbers(tokens.source_labels, source), _word_numbers(tokens.target_labels, target)
    # The labels stay those of the words alone, so that words are their own words.
    names = (tokens.source_labels, tokens.target_labels)
    return AttentionMap(weights, source_labels, target_labels, sources, targets, *names)


def _membership(
    words: Sequence[int], tokens: Sequence[str], labels: Sequence[str], keep_end: bool
) -> tuple[np.ndarray, list[str]]:
    """tokens x words of 0 and 1, and the labels, with a last column for tokens of no word when they are kept."""
    ends = [token for token, word in zip(tokens, words, strict=True) if word == NO_WORD]
    member = np.zeros((len(words), len(labels) + 1))
    member[np.arange(len(words)), [len(labels) if word == NO_WORD else word for word in words]] = 1
    if keep_end and ends:
        return member, [*labels, ends[0] if len(set(ends)) == 1 else "other"]
    return member[:, :-1], list(labels)


def _word_numbers(labels: Sequence[str], member: np.ndarray) -> list[int]:
    return [*range(len(labels)), *([NO_WORD] * (member.shape[1] - len(labels)))]


def links(attention: AttentionMap, threshold: float = 0.0) -> list[Link]:
    """Each target position linked with the source position it looked at most, if with at least `threshold`.

    A kept </s> acts as the empty word: what looks there most is not linked, nor is </s> itself.
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
    """Two alignments of the same pair, both written (source, target), made into one (Koehn, Och and Marcu 2003)."""
    one, other = set(forward), set(backward)
    if how == "intersection":
        return sorted(one & other)
    if how == "union":
        return sorted(one | other)
    result = _grow(one & other, one | other)
    if how == "grow-diag-final-and":
        for link in [*sorted(one), *sorted(other)]:
            if link[0] not in {s for s, _ in result} and link[1] not in {t for _, t in result}:
                result.add(link)
    return sorted(result)


def _grow(result: set[Link], union: set[Link]) -> set[Link]:
    """Adds neighbours, diagonal ones too, that the other direction proposed and that bring in a new word."""
    around = [(s, t) for s in (-1, 0, 1) for t in (-1, 0, 1) if (s, t) != (0, 0)]
    grown = True
    while grown:
        grown = False
        for source, target in sorted(result):
            for step in around:
                link = (source + step[0], target + step[1])
                if link not in union or link in result:
                    continue
                if link[0] not in {s for s, _ in result} or link[1] not in {t for _, t in result}:
                    result.add(link)
                    grown = True
    return result


def pharaoh(pairs: Iterable[Link]) -> str:
    """`0-0 1-2`: source-target, from 0, in order, each once."""
    return " ".join(f"{source}-{target}" for source, target in sorted(set(pairs)))


@dataclass(frozen=True, slots=True)
class Gold:
    """What people aligned: the sure links, and the possible ones, which include the sure ones."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def parse_pharaoh(line: str, where: str = "") -> Gold:
    """Reads `0-0 1-2`, with `1?2` or `1p2` for a link that is only possible."""
    sure, possible = set(), set()
    for item in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", item)
        if not match:
            raise InputError(f"cannot read the link {item!r}", where=where, remedy="write 0-1, or 0?1 if only possible")
        link = (int(match[1]), int(match[3]))
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return Gold(frozenset(sure), frozenset(possible))


def alignment_error_rate(
    predicted: Collection[Hashable], sure: Collection[Hashable], possible: Collection[Hashable] = ()
) -> float:
    """1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|), from 0 to 1 (Och and Ney 2003); sure links are possible ones too.

    Counts of a corpus are summed, not averaged: give links of all its lines at once, as (line, source, target).
    """
    a, s = set(predicted), set(sure)
    p = s | set(possible)
    return 1 - (len(a & s) + len(a & p)) / (len(a) + len(s)) if a or s else 0.0


def visible(text: str) -> str:
    """A label that can be drawn anywhere: blanks are seen, and nothing in it can move the pen or the cursor."""
    if text.isspace():
        return "␣" * len(text)
    return "".join(_drawable(character) for character in text)


def _drawable(character: str) -> str:
    if character in "\u200c\u200d":  # joiners: part of the spelling in Persian, Hindi, emoji
        return character
    kind = unicodedata.category(character)
    if kind == "Cf":  # direction marks and other invisible ones
        return ""
    if kind in ("Zs", "Zl", "Zp"):
        return " "
    return "\ufffd" if kind.startswith("C") and kind != "Co" else character
