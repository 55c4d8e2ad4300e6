"""Invented examples whose sources are files in, a folder out: the files, the lines that name them, what is true.

FOLDER/pairs.tsv    file [TAB text] TAB target        FOLDER/files/    what the lines name
FOLDER/truth.jsonl  one object a line: what only an inventor can know, such as where a shape stands
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transduce.errors import InputError, nearest


@dataclass(frozen=True)
class Filed:
    """One invented example. Its source is a file, by its ending, and a text behind it where there is one."""

    text: str
    target: str
    files: Mapping[str, bytes]  # ending -> content
    truth: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FiledSet:
    """An invented set of files, endless, and what it is."""

    about: str
    draw: Callable[[random.Random, bool], Iterator[Filed]]  # chance, held out
    task: str  # what `transduce train --task` calls it


def write_set(sets: Mapping[str, FiledSet], name: str, folder: Path, count: int, seed: int, held_out: bool) -> Path:
    """So many examples of a set; the file of their lines."""
    if name not in sets:
        raise InputError(f"no set is called {name!r}", remedy=nearest(name, sets))
    (folder / "files").mkdir(parents=True, exist_ok=True)
    examples = sets[name].draw(random.Random(f"{name} {seed} {held_out}"), held_out)
    pairs = folder / "pairs.tsv"
    with open(pairs, "w", encoding="utf-8") as lines, open(folder / "truth.jsonl", "w", encoding="utf-8") as truth:
        for example in islice(examples, count):
            source = [_write(folder, ending, content) for ending, content in example.files.items()]
            lines.write("\t".join([*source, *([example.text] if example.text else []), example.target]) + "\n")
            truth.write(json.dumps(example.truth) + "\n")
    return pairs


def _write(folder: Path, ending: str, content: bytes) -> str:
    """Named by its content: two examples of one picture share its file."""
    name = f"files/{hashlib.sha256(content).hexdigest()[:16]}.{ending}"
    (folder / name).write_bytes(content)
    return name
