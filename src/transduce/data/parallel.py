"""Two parallel files of different length enter, the error that shows where they part leaves."""

from __future__ import annotations

import numpy as np

from transduce.data.files import stored_lines
from transduce.errors import InputError


def mismatch(source: str, target: str) -> InputError:
    """The error that says both counts and the first suspicious line."""
    sides = [_lengths(source), _lengths(target)]
    line, sign = suspicious_line(*sides)
    longer = source if len(sides[0]) > len(sides[1]) else target
    return InputError(
        f"{source} has {len(sides[0]):,} lines, {target} has {len(sides[1]):,}",
        where=f"{longer}:{line}",
        remedy=f"the first suspicious line is {line:,}: {sign}",
    )


def _lengths(path: str) -> np.ndarray:
    return np.fromiter((len(raw.strip()) for _, raw in stored_lines(path)), np.int64)


def suspicious_line(source: np.ndarray, target: np.ndarray) -> tuple[int, str]:
    """Where two sides of different length stop matching, from the lengths of their lines alone.

    The first line with exactly one empty side; else the place where taking the surplus out of the longer side fits
    the lengths of all pairs before and after it best.
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
    # cost[k]: the first k lines are pairs as they stand, the rest are pairs after `surplus` lines more
    cost = np.concatenate([[0.0], np.cumsum(before)]) + np.concatenate([np.cumsum(after[::-1])[::-1], [0.0]])
    best = common - int(cost[::-1].argmin())
    if best == common:
        return common, "the last that both files have"
    return best + 1, "from there on the two sides differ most in length"
