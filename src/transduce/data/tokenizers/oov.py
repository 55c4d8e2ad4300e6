"""Out-of-vocabulary placeholders: numbered <unk> tokens that distinguish the unknown words of a source.

The j-th distinct unknown word of a source is <unkj>, in the source and in its target (Luong et al. 2015). So unseen
words can be copied: decoding replaces the placeholders of a prediction by the words of its source. An unknown word of a
target that its source does not contain stays <unk>, as does a word beyond the last placeholder. Ids depend on the pair
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from transduce.data.tokenizers.tokenizer import Encoding, Tokenizer
from transduce.flow import UNK


def oov_words(tokenizer: Tokenizer, source: str) -> list[str]:
    """The distinct words of a source that have a placeholder, in order."""
    if not tokenizer.oov_placeholders:
        return []
    encoding = tokenizer.encode_source(source)
    spans = zip(encoding.ids, encoding.offsets, strict=True)
    words = dict.fromkeys(source[begin:end] for number, (begin, end) in spans if number == UNK)
    return [word for word in words if not word.isspace()][: tokenizer.oov_placeholders]


def encode_sources(tokenizer: Tokenizer, texts: Sequence[str], *, separated: bool = True) -> list[list[int]]:
    """The ids of each source, its parts separated by </s>, with placeholders for its unknown words."""
    rows = tokenizer.encode_sources(texts, separated=separated)
    if not tokenizer.oov_placeholders:
        return rows
    return [
        _with_placeholders(tokenizer, text, tokenizer.encode_source(text), text) if UNK in ids else ids
        for ids, text in zip(rows, texts, strict=True)
    ]


def encode_targets(tokenizer: Tokenizer, texts: Sequence[str], sources: Sequence[str]) -> list[list[int]]:
    """The ids of each target, with the placeholders of its source; both sides share one vocabulary."""
    rows = [[*tokenizer.prefix, *ids] for ids in tokenizer.encode_batch(texts)]
    if not tokenizer.oov_placeholders:
        return rows
    return [
        _with_placeholders(tokenizer, text, tokenizer.encode(text), source) if UNK in ids else ids
        for ids, text, source in zip(rows, texts, sources, strict=True)
    ]


def _with_placeholders(tokenizer: Tokenizer, text: str, encoding: Encoding, source: str) -> list[int]:
    placeholder_of = dict(zip(oov_words(tokenizer, source), tokenizer.oov_ids, strict=False))
    return [
        placeholder_of.get(text[begin:end], UNK) if number == UNK else number
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
