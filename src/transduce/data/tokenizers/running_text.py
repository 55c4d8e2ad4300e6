"""Blocks of a running text enter; the ids of the whole text, and how much text each id is, leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.flow import BOS, EOS

_BEFORE = "x"  # any letter: what stands before a line feed never becomes one piece with it


def encode_running_text(tokenizer: Tokenizer, blocks: Sequence[str]) -> list[list[int]]:
    """The ids of blocks that follow one another (see `sources.blocks`).

    A block that goes on from another one begins with a line feed. It is read after a letter, which is taken off again:
    a tokenizer that puts a space in front of every text must not put one inside this one.
    """
    skip = len(tokenizer.encode_batch([_BEFORE])[0])
    later = [block.startswith("\n") for block in blocks]
    texts = [_BEFORE + block if follows else block for block, follows in zip(blocks, later, strict=True)]
    rows = tokenizer.encode_batch(texts)
    return [ids[skip:] if follows else ids for ids, follows in zip(rows, later, strict=True)]


@dataclass(frozen=True)
class CountedText:
    """One text as a model foretells it: <s> and n ids, the last of them </s>, and what the n foretold ones hold."""

    ids: np.ndarray  # n + 1
    words: np.ndarray  # n: words that begin in each foretold id
    characters: np.ndarray  # n: characters up to the end of it, after the one before


def count_text(tokenizer: Tokenizer, blocks: Iterable[str]) -> CountedText:
    """The text of these blocks in ids, with the words and characters of each; </s> is one word and one character.

    White space that tokens leave unsaid belongs to the token after it. Of a character in several tokens the first has
    all: sums over a stretch that cuts a character in two are off by one, those over the text are exact.
    """
    ids, words, characters = [BOS], [], []
    for block in blocks:
        begin = len(_BEFORE) if block.startswith("\n") else 0
        encoded = tokenizer.encode(_BEFORE[:begin] + block)
        skip = len(tokenizer.encode(_BEFORE[:begin]).ids)
        ids += encoded.ids[skip:]
        ends = [min(max(end - begin, 0), len(block)) for _, end in encoded.offsets[skip:]]
        if ends:
            ends[-1] = len(block)  # white space at the end that no token says
        counted = np.maximum.accumulate(np.array([0, *ends]))
        begins = np.concatenate(([0], np.cumsum(word_starts(block))))  # words that begin before each character
        characters.append(np.diff(counted))
        words.append(np.diff(begins[counted]))
    one = np.ones(1, np.int64)
    return CountedText(
        np.array([*ids, EOS], np.int64), np.concatenate([*words, one]), np.concatenate([*characters, one])
    )


def word_starts(text: str) -> list[bool]:
    """For each character, whether a word begins with it: a block begins after white space, or is the first."""
    space = [True, *(character.isspace() for character in text)]
    return [before and not now for before, now in pairwise(space)]
