"""Outputs and right answers enter as people hold them; each output with the list of its references leaves."""

from __future__ import annotations

from collections.abc import Sequence

from transduce.errors import InputError

References = Sequence[str] | Sequence[Sequence[str]]


def as_references(references: References) -> list[list[str]]:
    """One list of references for each line. A plain string is one reference, not a sequence of characters."""
    lines = [[line] if isinstance(line, str) else list(line) for line in references]
    for number, line in enumerate(lines, start=1):
        if not line:
            raise InputError(f"line {number} has no reference", remedy="every line needs at least one")
    return lines


def pair_up(hypotheses: Sequence[str], references: References) -> list[tuple[str, list[str]]]:
    lines = as_references(references)
    if len(hypotheses) != len(lines):
        raise InputError(
            f"{len(hypotheses)} hypotheses but {len(lines)} lines of references",
            remedy="give one line of references for each hypothesis, in the same order",
        )
    return list(zip(hypotheses, lines, strict=True))
