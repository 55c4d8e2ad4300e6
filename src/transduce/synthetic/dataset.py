"""Synthetic data sets: their description, the held-out split, invented names, and sets whose sources are files.

A set whose sources are files is written as a folder:

    FOLDER/pairs.tsv    file [TAB text] TAB target        FOLDER/files/    the files named in pairs.tsv
    FOLDER/truth.jsonl  one object per line: annotation known to the generator, such as the bounding box of a shape
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from transduce.flow import Example
from transduce.storage import open_atomic, staged_folder, write_file

HELD_OUT = 5  # one word in five is held out


@dataclass(frozen=True)
class FileExample:
    """A generated example whose source is a file, followed by a text where `text` is not empty."""

    text: str
    target: str
    files: Mapping[str, bytes]  # file name extension -> content
    truth: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SyntheticDataset:
    """A generated data set: what it contains, the task it suits, and its generator.

    The generator takes a random number generator and whether the examples belong to the held-out part. It yields
    `Example`s, or `FileExample`s where `writes_files`; most generators are endless.
    """

    description: str
    task: str  # for `transduce train --task`
    generate: Callable[[random.Random, bool], Iterator[Any]]
    columns: int = 1  # columns of a TSV line that form the source; 0: plain text, without a source
    settings: tuple[str, ...] = ()  # overrides that its recipe needs, `key=value`
    writes_files: bool = False
    salt: str = ""  # of the random seed; without it the name. A set that is renamed keeps its salt, and so its data.


def is_held_out(word: str) -> bool:
    """Whether a word belongs to the held-out part. It depends on the word alone, never on a seed."""
    return crc32(word.encode()) % HELD_OUT == 0


def invented_name(rng: random.Random, held_out: bool) -> str:
    """A capitalised name of two or three syllables, such as Dorava."""
    while True:
        syllables = (
            rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") + rng.choice(("", "", "", "n", "r", "l", "s"))
            for _ in range(rng.randint(2, 3))
        )
        name = "".join(syllables).capitalize()
        if is_held_out(name) == held_out:
            return name


def invented_names(rng: random.Random, held_out: bool, count: int) -> list[str]:
    """`count` distinct names."""
    names = dict[str, None]()
    while len(names) < count:
        names[invented_name(rng, held_out)] = None
    return list(names)


def distinct(examples: Iterable[Example]) -> Iterator[Example]:
    """The examples without repetitions of a pair."""
    seen: set[tuple[str, str | None]] = set()
    for example in examples:
        if (example.source, example.target) not in seen:
            seen.add((example.source, example.target))
            yield example


def pair_line(example: Example, columns: int) -> str:
    """The line of an example in a file: TSV, or plain text where there is no source."""
    return f"{example.source}\t{example.target}\n" if columns else f"{example.target}\n"


def write_folder(examples: Iterable[FileExample], folder: Path) -> Path:
    """Writes the files, the pairs and the truth of these examples; returns the path of pairs.tsv."""
    with (
        staged_folder(folder) as part,
        open_atomic(part / "pairs.tsv") as pairs,
        open_atomic(part / "truth.jsonl") as truth,
    ):
        (part / "files").mkdir()
        for example in examples:
            source = [_write_source(part, extension, content) for extension, content in example.files.items()]
            line = "\t".join([*source, *([example.text] if example.text else []), example.target])
            pairs.write(f"{line}\n".encode())
            truth.write(f"{json.dumps(example.truth)}\n".encode())
    return folder / "pairs.tsv"


def _write_source(folder: Path, extension: str, content: bytes) -> str:
    """The file is named after its content: two examples with the same image share one file."""
    name = f"files/{hashlib.sha256(content).hexdigest()[:16]}.{extension}"
    write_file(folder / name, content, durable=False)  # thousands of files, which can be generated again
    return name
