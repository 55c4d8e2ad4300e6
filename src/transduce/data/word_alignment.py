"""Word alignments in Pharaoh format: parsing, checking, and conversion to token alignments.

Links are written `0-0 1-2`: source word, target word, counted from 0. Every token of a linked target word is linked
with every token of its source word, so attention that follows the links sums to 1 over the source word.
"""

from __future__ import annotations

import re

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import EOS

ALIGNMENT = "alignment"  # the key of the alignment in `Example.extra` and `Batch.extra`
Link = tuple[int, int]


class AlignmentError(ValueError):
    """An invalid word alignment."""


def parse_alignment(text: str) -> list[Link]:
    matches = [re.fullmatch(r"([0-9]+)-([0-9]+)", item) for item in text.split()]
    if None in matches:
        raise AlignmentError(f"cannot read {text.split()[matches.index(None)]!r}: links are written 0-0 1-2")
    return [(int(match[1]), int(match[2])) for match in matches if match is not None]


def check_alignment(text: str, source: str, target: str) -> None:
    """Raises an error where a link refers to a word that does not exist."""
    words = [len(Tokenizer.word_spans(side)) for side in (source, target)]
    for link in parse_alignment(text):
        for word, count, side in zip(link, words, ("source", "target"), strict=True):
            if word >= count:
                raise AlignmentError(f"{link[0]}-{link[1]} links word {word} of a {side} of {count} words, from 0")


def token_alignment(alignment: str, source: str, target: str, tokenizers: tuple[Tokenizer, Tokenizer]) -> list[Link]:
    """Links of words -> links of tokens: all tokens of one word with all tokens of the other."""
    encodings = (tokenizers[0].encode_source(source), source), (tokenizers[1].encode(target), target)
    sides: list[dict[int, list[int]]] = []
    for (encoding, text), suffix in zip(encodings, (len(tokenizers[0].suffix), 0), strict=True):
        tokens: dict[int, list[int]] = {}
        for position, word in enumerate(Tokenizer.word_ids(encoding, text)[: len(encoding.ids) - suffix]):
            if encoding.ids[position] != EOS:  # it separates the parts of a source and belongs to no word
                tokens.setdefault(word, []).append(position)
        sides.append(tokens)
    links = parse_alignment(alignment)
    return [(s, t) for one, other in links for s in sides[0].get(one, []) for t in sides[1].get(other, [])]
