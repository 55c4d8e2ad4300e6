"""A pair with links between its words enters; they are checked, and leave as links between its tokens.

Links are written as Pharaoh does, `0-0 1-2`: source word, target word, from 0. Every token of a linked target word is
linked with every token of its source word, so an attention that follows them adds up to 1 over the source word.
"""

from __future__ import annotations

import re

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import EOS

ALIGNMENT = "alignment"  # the name of the links in `Example.extra` and `Batch.extra`
Link = tuple[int, int]


class AlignmentError(ValueError):
    """What is wrong with a line of links."""


def parse_alignment(text: str) -> list[Link]:
    found = [re.fullmatch(r"([0-9]+)-([0-9]+)", item) for item in text.split()]
    if None in found:
        raise AlignmentError(f"cannot read {text.split()[found.index(None)]!r}: links are written 0-0 1-2")
    return [(int(match[1]), int(match[2])) for match in found if match is not None]


def check_alignment(text: str, source: str, target: str) -> None:
    """Refuses links to words that are not there."""
    words = [len(Tokenizer.word_spans(side)) for side in (source, target)]
    for link in parse_alignment(text):
        for place, count, side in zip(link, words, ("source", "target"), strict=True):
            if place >= count:
                raise AlignmentError(f"{link[0]}-{link[1]} links word {place} of a {side} of {count} words, from 0")


def token_alignment(links: str, source: str, target: str, tokenizers: tuple[Tokenizer, Tokenizer]) -> list[Link]:
    """Links of words -> links of tokens: all of one word with all of the other."""
    read = (tokenizers[0].encode_source(source), source), (tokenizers[1].encode(target), target)
    sides: list[dict[int, list[int]]] = []
    for (encoded, text), beyond in zip(read, (len(tokenizers[0].suffix), 0), strict=True):
        tokens: dict[int, list[int]] = {}
        for place, word in enumerate(Tokenizer.word_ids(encoded, text)[: len(encoded.ids) - beyond]):
            if encoded.ids[place] != EOS:  # which parts two texts, and is no word of either
                tokens.setdefault(word, []).append(place)
        sides.append(tokens)
    pairs = parse_alignment(links)
    return [(s, t) for one, other in pairs for s in sides[0].get(one, []) for t in sides[1].get(other, [])]
