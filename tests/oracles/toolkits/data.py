"""Data, records and command lines that the recordings of all toolkits share."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(12)]
BEAM = 4


def reversals(count: int, seed: int) -> list[tuple[str, str]]:
    """Sources of one to six words, and the same words in reverse."""
    rng = random.Random(seed)
    rows = [[rng.choice(WORDS) for _ in range(rng.randint(1, 6))] for _ in range(count)]
    return [(" ".join(row), " ".join(reversed(row))) for row in rows]


TRAIN, TEST = reversals(200, 1), [source for source, _ in reversals(30, 2)]


@dataclass
class Recording:
    """What a toolkit computed with one model; every output is one line of tokens."""

    toolkit: str
    version: str
    settings: str  # in words, for the table of the documentation
    files: list[str] = field(default_factory=list)  # of the model, in the folder of the recording
    max_length: int = 0  # tokens of the longest output that its search allows
    greedy: list[str] | None = None
    beam: list[str] | None = None
    targets: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # log-probability of each target, </s> included
    tolerance: float = 1e-4  # of scores, which are printed with few digits
    search: dict[str, Any] = field(default_factory=dict)  # native settings of the same beam search

    def save(self, folder: Path, made: Path) -> None:
        """Keeps the files of the model and this record; `made` is where the toolkit wrote the files."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in self.files:
            shutil.copy(made / name, folder / name)
        content: dict[str, Any] = {"sources": TEST, **vars(self)}
        content["scores"] = [round(score, 6) for score in self.scores]
        (folder / "record.json").write_text(json.dumps(content, indent=1) + "\n")


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_data(folder: Path) -> None:
    """train.src, train.tgt, test.src, and test.tgt, whose targets are not what they should be: reversed sources."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "train.src", [source for source, _ in TRAIN])
    write_lines(folder / "train.tgt", [target for _, target in TRAIN])
    write_lines(folder / "test.src", TEST)
    write_lines(folder / "test.tgt", targets())


def targets() -> list[str]:
    return [" ".join(reversed(source.split())) for source in TEST]


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """The standard output of a command that must succeed."""
    import os

    done = subprocess.run(
        list(command), cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
