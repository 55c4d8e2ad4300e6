"""Preparation of a corpus by several workers: processor seconds, wall time and memory of a worker.

`python -m benchmarks.corpora --lines 10000000 --workers 1 2 --backends local ray` prints a table and writes JSON to
benchmarks/results. The lines are synthetic: pairs of about 90 characters, of which a tenth are duplicates and a tenth
near duplicates. Efficiency is the ratio of processor seconds of the workers, since cores may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import machine
from transduce.data import corpus_pipeline
from transduce.data.corpus_pipeline import PipelineOptions, ReadStep, WriteStep, prepare_corpora
from transduce.data.filters import TextFilters
from transduce.recipe import Corpus

OPTIONS = PipelineOptions(
    TextFilters(max_ratio=3, copies=False, bad_encoding=False),
    normalisation=("canonical", "quotes", "spaces"),
    drop_duplicates=True,
    near_duplicates=0.8,
)


def _record(output: str, step: str, number: int, begun: float) -> None:
    """Writes what a task has cost; the folder is beside the output."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    content = {"step": step, "processor": time.process_time() - begun, "peak": peak, "worker": os.getpid()}
    Path(f"{output}.costs").mkdir(exist_ok=True)
    Path(f"{output}.costs", f"{step}-{number}.json").write_text(json.dumps(content))


class MeasuredRead(ReadStep):
    def __call__(self, number: int) -> None:
        begun = time.process_time()
        super().__call__(number)
        _record(self.job.output, "read", number, begun)


class MeasuredWrite(WriteStep):
    def __call__(self, number: int) -> None:
        begun = time.process_time()
        super().__call__(number)
        _record(self.job.output, "write", number, begun)


@dataclass(frozen=True)
class Preparation:
    """One preparation of all lines."""

    backend: str
    workers: int
    lines: int
    kept: int
    seconds: float  # wall
    worker_seconds: float  # processor seconds of all tasks
    driver_seconds: float  # processor seconds of the process that finds duplicates and, with one worker, does the tasks
    peak_worker: int  # bytes resident at most
    efficiency: float  # processor seconds of tasks with one worker / with these
    same_bytes: bool  # as the first preparation


def write_lines(path: Path, lines: int, seed: int = 1) -> None:
    """Synthetic pairs: new ones, duplicates and near duplicates."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    recent: list[list[str]] = []
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(lines):
            kind, chosen = draw.random(), draw.choices(words, k=7)
            if recent and kind < 0.2:
                chosen = list(draw.choice(recent))
                if kind < 0.1:
                    chosen[draw.randrange(7)] += "s"
            elif len(recent) < 100_000:
                recent.append(chosen)
            file.write(f"{' '.join(chosen)}\t{' '.join(reversed(chosen)).title()}\n")


def measure(path: Path, output: Path, lines: int, backend: str, workers: int, shard_lines: int) -> Preparation:
    options = PipelineOptions(**{**vars(OPTIONS), "shard_lines": shard_lines})
    wall, processor = time.perf_counter(), time.process_time()
    with patch.multiple(corpus_pipeline, ReadStep=MeasuredRead, WriteStep=MeasuredWrite):
        found = prepare_corpora([Corpus(path=str(path))], output, options, workers=workers, backend=backend)  # type: ignore[arg-type]
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    costs = [json.loads(file.read_bytes()) for file in Path(f"{output}.costs").iterdir()]
    total, peak = sum(one["processor"] for one in costs), max(one["peak"] for one in costs)
    return Preparation(backend, workers, lines, found["kept"], wall, total, processor, peak, 1.0, True)


def run(lines: int, workers: list[int], backends: list[str], shard_lines: int) -> Iterator[list[Preparation]]:
    """The preparations so far, after each of them."""
    rows: list[Preparation] = []
    with tempfile.TemporaryDirectory() as folder:
        path, hashes = Path(folder, "pairs.tsv"), []
        write_lines(path, lines)
        for backend in backends:
            for count in workers:
                output = Path(folder, f"{backend}-{count}")
                row = measure(path, output, lines, backend, count, shard_lines)
                hashes.append([one["sha256"] for one in json.loads((output / "manifest.json").read_bytes())["shards"]])
                ratio = rows[0].worker_seconds / row.worker_seconds if rows else 1.0
                rows.append(Preparation(**{**asdict(row), "efficiency": ratio, "same_bytes": hashes[-1] == hashes[0]}))
                shutil.rmtree(output)
                yield rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpora", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--backends", nargs="*", default=["local"])
    parser.add_argument("--shard-lines", type=int, default=500_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/corpora.json"))
    args = parser.parse_args()
    for rows in run(args.lines, args.workers, args.backends, args.shard_lines):
        content = {
            "machine": machine(torch.device("cpu")),
            "cores": os.cpu_count(),
            "preparations": [*map(asdict, rows)],
        }
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    table = Table(
        "backend", "workers", "lines", "kept", "wall s", "task s", "driver s", "peak MB", "efficiency", "same"
    )
    for row in rows:
        seconds = (f"{one:.1f}" for one in (row.seconds, row.worker_seconds, row.driver_seconds))
        cells = [row.backend, str(row.workers), f"{row.lines:,}", f"{row.kept:,}", *seconds]
        table.add_row(*cells, f"{row.peak_worker / 1e6:.0f}", f"{row.efficiency:.2f}", str(row.same_bytes))
    Console().print(table)


if __name__ == "__main__":
    main()
