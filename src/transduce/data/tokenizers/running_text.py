"""Tokenisation of running text that is stored in chunks, with word and character counts per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import BOS, EOS

_CONTEXT = "x"  # any letter: a line feed never merges with the letter before it


def encode_running_text(tokenizer: Tokenizer, chunks: Sequence[str]) -> list[list[int]]:
    """The ids of consecutive chunks of a text (see `readers.corpus.text_chunks`).

    A chunk that continues another one begins with a line feed. It is encoded after a letter, whose ids are removed
    again: a tokenizer that prepends a space to every text must not insert one inside this text.
    """
    skip = len(tokenizer.encode_batch([_CONTEXT])[0])
    continued = [chunk.startswith("\n") for chunk in chunks]
    texts = [_CONTEXT + chunk if follows else chunk for chunk, follows in zip(chunks, continued, strict=True)]
    rows = tokenizer.encode_batch(texts)
    return [ids[skip:] if follows else ids for ids, follows in zip(rows, continued, strict=True)]


@dataclass(frozen=True)
class CountedText:
    """A text as a language model predicts it: <s>, then n ids ending in </s>, with word and character counts.

    The counts allow perplexity per word and bits per character.
    """

    ids: np.ndarray  # n + 1
    words: np.ndarray  # n: words that begin in each predicted token
    characters: np.ndarray  # n: characters of each predicted token


def count_text(tokenizer: Tokenizer, chunks: Iterable[str]) -> CountedText:
    """The ids of a text with word and character counts; </s> counts as one word and one character.

    White space without a token belongs to the next token. A character that spans several tokens counts for the first of
    them: sums over a span that splits a character are off by one, sums over the whole text are exact.
    """
    ids, words, characters = [BOS], [], []
    for chunk in chunks:
        begin = len(_CONTEXT) if chunk.startswith("\n") else 0
        encoding = tokenizer.encode(_CONTEXT[:begin] + chunk)
        skip = len(tokenizer.encode(_CONTEXT[:begin]).ids)
        ids += encoding.ids[skip:]
        ends = [min(max(end - begin, 0), len(chunk)) for _, end in encoding.offsets[skip:]]
        if ends:
            ends[-1] = len(chunk)  # includes white space at the end that has no token
        offsets = np.maximum.accumulate(np.array([0, *ends]))
        words_before = np.concatenate(([0], np.cumsum(word_starts(chunk))))  # words that begin before each character
        characters.append(np.diff(offsets))
        words.append(np.diff(words_before[offsets]))
    one = np.ones(1, np.int64)
    return CountedText(
        np.array([*ids, EOS], np.int64), np.concatenate([*words, one]), np.concatenate([*characters, one])
    )


def word_starts(text: str) -> list[bool]:
    """For each character, whether a word begins with it; a chunk begins after white space, or at the start."""
    space = [True, *(character.isspace() for character in text)]
    return [before and not now for before, now in pairwise(space)]
