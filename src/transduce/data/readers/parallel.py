"""Parallel files: two files whose lines, or SGML segments, belong together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np

from transduce.data.readers.files import stored_lines
from transduce.data.readers.formats import Parse, decode
from transduce.data.readers.translation_files import sgml_segments
from transduce.errors import InputError, UnreadableError
from transduce.flow import Example
from transduce.recipe import Corpus


def side_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of one side; of an SGML file its segments."""
    return sgml_segments(path) if Path(path).suffix.lower() in (".sgm", ".sgml") else stored_lines(path)


def mismatch(source: str, target: str) -> InputError:
    """The error for parallel files of different lengths: both counts and the first suspicious line."""
    sides = [_lengths(source), _lengths(target)]
    line, sign = suspicious_line(*sides)
    longer = source if len(sides[0]) > len(sides[1]) else target
    return InputError(
        f"{source} has {len(sides[0]):,} lines, {target} has {len(sides[1]):,}",
        where=f"{longer}:{line}",
        remedy=f"the first suspicious line is {line:,}: {sign}",
    )


def _lengths(path: str) -> np.ndarray:
    return np.fromiter((len(raw.strip()) for _, raw in side_lines(path)), np.int64)


def suspicious_line(source: np.ndarray, target: np.ndarray) -> tuple[int, str]:
    """The line where two files of different lengths stop matching, estimated from the lengths of their lines.

    The first line with exactly one empty side; else the line at which removing the surplus from the longer file best
    fits the lengths of all pairs before and after it.
    """
    common = min(len(source), len(target))
    one_empty = (source[:common] == 0) != (target[:common] == 0)
    if one_empty.any():
        return int(one_empty.argmax()) + 1, "one side is empty there"
    if common == 0:
        return 1, "one file is empty"
    shorter, longer = sorted((np.log1p(source), np.log1p(target)), key=len)
    surplus = len(longer) - common
    usual = np.median(longer) - np.median(shorter)
    before = np.abs(longer[:common] - shorter - usual)
    after = np.abs(longer[surplus:] - shorter - usual)
    # cost[k]: the first k lines match as they are, the rest match after skipping `surplus` lines
    cost = np.concatenate([[0.0], np.cumsum(before)]) + np.concatenate([np.cumsum(after[::-1])[::-1], [0.0]])
    best = common - int(cost[::-1].argmin())
    if best == common:
        return common, "the last line of the shorter file"
    return best + 1, "from there on the two sides differ most in length"


def parallel_rows(corpus: Corpus) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    if corpus.source is None or corpus.target is None:
        raise InputError("parallel text needs both `source` and `target`", where=str(corpus.source or corpus.target))
    for source, target in zip_longest(side_lines(corpus.source), side_lines(corpus.target)):
        if source is None or target is None:
            raise mismatch(corpus.source, corpus.target)
        yield source[0], (source[1], target[1])


def parallel_pair(target_file: str) -> Parse:
    def parse(row: tuple[bytes, bytes], file: str, number: int) -> Example:
        source = decode(row[0])
        try:
            return Example(source, decode(row[1]), {}, file, number)
        except UnreadableError as bad:
            bad.file = target_file
            raise

    return parse
