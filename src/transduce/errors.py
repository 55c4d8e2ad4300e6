"""User-facing errors: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class InputError(Exception):
    """Invalid input: a file, a recipe or an argument. The command line prints it without a traceback."""

    def __init__(self, problem: str, *, where: str = "", remedy: str = "") -> None:
        self.problem, self.where, self.remedy = problem, where, remedy
        super().__init__(f"{where}: {problem}" if where else problem, *([remedy] if remedy else []))

    def __str__(self) -> str:
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{head}\n  {self.remedy}" if self.remedy else head


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a misspelt name, else the list of known names."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def check_path(what: str, path: str | Path) -> str | Path:
    """The path of a file or a folder, unchanged; anything else is refused."""
    if not isinstance(path, (str, Path)):
        raise InputError(f"{path!r} is no path", where=what, remedy="give the name of a file or a folder as text")
    return path


class UnreadableError(Exception):
    """An unreadable line, or a file it refers to: a reason for the statistics, and the exact problem."""

    def __init__(self, reason: str, detail: str = "", remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy
        self.problem = f"{reason}: {detail}" if detail else reason
        self.file = ""  # the file with the problem, if it is not that of the example
