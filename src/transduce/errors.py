"""The one error a user may see: what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(Exception):
    """Bad input: a file, a recipe, an argument. The command line prints it without a traceback."""

    def __init__(self, problem: str, *, where: str = "", remedy: str = "") -> None:
        self.problem, self.where, self.remedy = problem, where, remedy
        super().__init__(f"{where}: {problem}" if where else problem, *([remedy] if remedy else []))

    def __str__(self) -> str:
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{head}\n  {self.remedy}" if self.remedy else head


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a misspelt name, else the list of what there is."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
