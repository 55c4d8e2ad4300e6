"""Training in fp32 and in bf16 on a CPU: the network that is chosen for each generated data set.

`training.precision: auto` takes bf16 on a processor that multiplies matrices in it. This benchmark says where it pays:
for each data set, the tokens per second of both precisions, in turns, on one thread.

    python -m benchmarks.precision
    python -m benchmarks.precision transliteration shapes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import machine
from transduce.autoconfig import plan_for
from transduce.recipe import Recipe
from transduce.synthetic import SYNTHETIC
from transduce.training.experiment import train

# Examples, where not 1,000: the network follows their number.
COUNTS = {"inflection": (100, 1_000, 8_000), "transliteration": (1_000, 8_000), "translations": (1_000, 8_000)}
UPDATES, LOGGED = 24, 8  # of a training; of the speed that is read: the last ones, when everything is warm
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of training, the median over the repeats."""

    data: str
    task: str
    examples: int
    fp32: float
    bf16: float

    @property
    def ratio(self) -> float:
        return self.bf16 / self.fp32


def settings(updates: int) -> list[str]:
    """A training of a few updates without validations."""
    numbers = {"steps": updates, "log_every": LOGGED, "validate_every": 10**6, "checkpoint_every": 10**6}
    numbers |= {"min_epochs": 0, "average_checkpoints": 1, "patience": "null", "minutes": "null"}
    return [f"training.{name}={value}" for name, value in numbers.items()]


def recipe_in(precision: str, source: str, task: str, updates: int) -> Recipe:
    """The network that is chosen where the precision is not given: it is the same in both."""
    overrides = [*settings(updates), "training.schedule.warmup=2", "evaluation.resamples=10"]
    recipe = plan_for(source, overrides, task).recipe
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"precision": precision})})


def tokens_per_second(source: str, task: str, precision: str, updates: int) -> float:
    recipe = recipe_in(precision, source, task, updates)
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run")
        log = (Path(folder) / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries: list[Mapping[str, Any]] = [json.loads(line) for line in log]
    return float([entry for entry in entries if "tokens_per_second" in entry][-1]["tokens_per_second"])


def compare(name: str, count: int, repeats: int, updates: int) -> Speeds:
    kind = SYNTHETIC[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (name if kind.writes_files else f"{name}.tsv")
        command = [sys.executable, "-m", "transduce", "data", name, "--count", str(count), "--output", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        source = str(path / "pairs.tsv" if kind.writes_files else path)
        found: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for _ in range(repeats):
            for precision, speeds in found.items():
                speeds.append(tokens_per_second(source, kind.task, precision, updates))
    return Speeds(name, kind.task, count, *(round(median(found[precision])) for precision in PRECISIONS))


def show(rows: Sequence[Speeds]) -> None:
    table = Table("data", "task", "examples", "fp32", "bf16", "ratio")
    for one in rows:
        speeds = f"{one.fp32:,.0f}", f"{one.bf16:,.0f}", f"{one.ratio:.2f}"
        table.add_row(one.data, one.task, f"{one.examples:,}", *speeds)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("names", nargs="*", help="generated data sets; none: one of each task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few updates, which only check that everything works")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/precision-cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if unknown := set(args.names) - SYNTHETIC.keys():
        parser.error(f"no such data set: {', '.join(sorted(unknown))}")
    repeats, updates = (1, 2 * LOGGED) if args.tiny else (args.repeats, UPDATES)
    rows = []
    first = {kind.task: name for name, kind in reversed(SYNTHETIC.items())}
    for name in args.names or [name for name in SYNTHETIC if name in first.values()]:
        for count in (100,) if args.tiny else COUNTS.get(name, (1_000,)):
            rows.append(compare(name, count, repeats, updates))
            content = {"machine": machine(torch.device("cpu")), "rows": [asdict(one) for one in rows]}
            args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    main()
