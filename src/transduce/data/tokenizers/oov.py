"""Texts with words that a vocabulary lacks enter, ids that tell these words apart leave; and numbers turn into words.

The j-th different unknown word of a source is <unkj>, in the source and in its target (Luong 2015). So a word never
seen before can be said: whoever reads a prediction puts the words of its own source back. An unknown word of a target
that its source does not have stays <unk>, as does one beyond the last number. Ids depend on the pair alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from transduce.data.tokenizers.tokenizer import Encoding, Tokenizer
from transduce.flow import UNK


def oov_words(tokenizer: Tokenizer, source: str) -> list[str]:
    """The different words of a source that have a number, in its order."""
    if not tokenizer.oov_placeholders:
        return []
    encoded = tokenizer.encode_source(source)
    places = zip(encoded.ids, encoded.offsets, strict=True)
    words = dict.fromkeys(source[begin:end] for number, (begin, end) in places if number == UNK)
    return [word for word in words if not word.isspace()][: tokenizer.oov_placeholders]


def encode_sources(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Each source, its parts closed by </s>, with numbers for its own unknown words."""
    rows = tokenizer.encode_sources(texts)
    if not tokenizer.oov_placeholders:
        return rows
    return [
        _number(tokenizer, text, tokenizer.encode_source(text), text) if UNK in ids else ids
        for ids, text in zip(rows, texts, strict=True)
    ]


def encode_targets(tokenizer: Tokenizer, texts: Sequence[str], sources: Sequence[str]) -> list[list[int]]:
    """Each text with the numbers that its own source gives; one vocabulary serves both sides."""
    rows = [[*tokenizer.lead, *ids] for ids in tokenizer.encode_batch(texts)]
    if not tokenizer.oov_placeholders:
        return rows
    return [
        _number(tokenizer, text, tokenizer.encode(text), source) if UNK in ids else ids
        for ids, text, source in zip(rows, texts, sources, strict=True)
    ]


def _number(tokenizer: Tokenizer, text: str, encoded: Encoding, source: str) -> list[int]:
    number_of = dict(zip(oov_words(tokenizer, source), tokenizer.numbers, strict=False))
    return [
        number_of.get(text[begin:end], UNK) if number == UNK else number
        for number, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True)
    ]
