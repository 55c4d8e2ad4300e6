"""Recipes that are chosen without any option beside the hand-written ones: score and time on the same data.

For every generated data set that has a recipe in `recipes/`, `transduce train FILE --task TASK` and `transduce train
RECIPE` are trained in processes of their own, one after the other. Both choose their checkpoint on the same development
set, and the scores are those of the same test set. Rules are changed by the development scores, which are recorded too.

    python -m benchmarks.defaults
    python -m benchmarks.defaults transliteration shapes
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
DEV, TEST = 500, 1000  # examples
TINY = ("training.steps=4", "training.validate_every=4", "training.checkpoint_every=4", "evaluation.resamples=10")


@dataclass(frozen=True)
class Case:
    """A generated data set, and the recipe that was written for it."""

    task: str
    recipe: str
    metric: str
    count: int
    files: bool = False  # images or videos: a folder for each set, with pairs.tsv
    settings: tuple[str, ...] = ()  # changes of the recipe, as its page in docs/tasks states them


ENTAILMENT = (
    "model.encoder={kind: transformer, width: 64, layers: 2, heads: 4, ff_width: 128, dropout: 0.0}",
    "model.head.dropout=0.0",
    "training.steps=900",
    "training.batch_tokens=2048",
    "training.optimiser.learning_rate=0.003",
    "training.schedule.warmup=50",
    "training.validate_every=300",
    "training.checkpoint_every=300",
)
CASES = {
    "transliteration": Case("transliterate", "transliteration/attention.yaml", "exact", 8000),
    "inflection": Case("inflect", "inflection/attention.yaml", "exact", 8000),
    "questions": Case("answer", "questions/copy.yaml", "exact", 6000),
    "dialogue": Case("converse", "dialogue/transformer.yaml", "exact", 3000),
    "records": Case("describe", "records/copy.yaml", "bleu", 3000),
    "summaries": Case("summarise", "summaries/copy.yaml", "rougeL", 3000),
    "entailment": Case("entail", "entailment/classifier.yaml", "accuracy", 8000, settings=ENTAILMENT),
    "shapes": Case("caption", "shapes/attention.yaml", "exact", 3000, files=True),
    "shape-kinds": Case("classify-images", "shapes/patches.yaml", "accuracy", 3000, files=True),
    "scene-questions": Case("vqa", "shapes/questions.yaml", "exact", 3000, files=True),
    "actions": Case("classify-videos", "videos/actions.yaml", "accuracy", 3000, files=True),
}


@dataclass(frozen=True)
class Training:
    """One training: the command without the names of its files, and what it reached."""

    case: str
    chosen: bool  # without any option but the task; else the hand-written recipe
    command: str
    network: str
    metric: str
    dev: float
    test: float
    low: float  # of the 95 % interval on the test set
    high: float
    updates: int
    seconds: float
    processor_seconds: float  # of all threads, so that other programs count little
    machine: str


def _transduce(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "transduce", *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"transduce {shlex.join(arguments)}\n{done.stderr}")


def make_data(name: str, case: Case, folder: Path, count: int) -> dict[str, str]:
    """The files of the training, development and test set; words and names of the last two are new."""
    files = {}
    for seed, (part, number) in enumerate({"train": count, "dev": min(DEV, count), "test": min(TEST, count)}.items()):
        path = folder / (part if case.files else f"{part}.tsv")
        new = () if part == "train" or case.files else ("--held-out",)
        _transduce("data", name, "--count", str(number), "--seed", str(seed + 1), *new, "--output", str(path))
        files[part] = str(path / "pairs.tsv" if case.files else path)
    return files


def train(
    name: str, case: Case, chosen: bool, files: dict[str, str], folder: Path, settings: Sequence[str]
) -> Training:
    from benchmarks.harness import machine
    from transduce.training.distributed import pick_device

    held_out = [f"data.dev={files['dev']}", f"data.test={files['test']}", *settings]
    if chosen:
        arguments = ["train", files["train"], "--task", case.task, *held_out]
    else:
        # A training set of several source columns is named by its path, and keeps its columns.
        columns = "data.train.path" if _has_columns(case.recipe) else "data.train"
        arguments = ["train", f"recipes/{case.recipe}", f"{columns}={files['train']}", *held_out, *case.settings]
    run = folder / ("chosen" if chosen else "recipe")
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    _transduce(*arguments, "--run", str(run))
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    results: dict[str, Any] = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    dev, test = (results[part]["scores"][case.metric] for part in ("dev", "test"))
    return Training(
        name,
        chosen,
        f"transduce {shlex.join(arguments)}".replace(f"{folder}/", ""),
        network(run),
        case.metric,
        dev["value"],
        test["value"],
        test["low"],
        test["high"],
        updates(run),
        seconds,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        machine(pick_device("auto")),
    )


def _has_columns(recipe: str) -> bool:
    return "source_columns" in (ROOT / "recipes" / recipe).read_text(encoding="utf-8")


def network(run: Path) -> str:
    """The encoder of a run in a few words."""
    encoder = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["model"]["encoder"]
    return f"{encoder['kind'].replace('_', ' ')} {encoder['width']}"


def updates(run: Path) -> int:
    lines = (json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return max((line["step"] for line in lines if "step" in line), default=0)


def show(trainings: Sequence[Training], console: Console) -> None:
    table = Table("data", "metric", "recipe", "dev", "test", "updates", "seconds", "processor seconds")
    for one in trainings:
        recipe = "chosen" if one.chosen else CASES[one.case].recipe
        scores = (f"{one.dev:.1f}", f"{one.test:.1f}")
        table.add_row(
            one.case,
            one.metric,
            recipe,
            *scores,
            f"{one.updates:,}",
            f"{one.seconds:.0f}",
            f"{one.processor_seconds:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"data sets: {', '.join(CASES)}; none: all")
    parser.add_argument("--only", choices=["chosen", "recipe"], help="one of the two trainings")
    parser.add_argument("--tiny", action="store_true", help="a few updates, which only check that everything works")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/defaults.jsonl"))
    args = parser.parse_args()
    if unknown := set(args.names) - CASES.keys():
        parser.error(f"no such data set: {', '.join(sorted(unknown))}")
    console, trainings = Console(width=140), []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name in args.names or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            files = make_data(name, case, Path(folder), 60 if args.tiny else case.count)
            for chosen in (False, True):
                if args.only in (None, "chosen" if chosen else "recipe"):
                    trainings.append(train(name, case, chosen, files, Path(folder), TINY if args.tiny else ()))
                    with args.output.open("a", encoding="utf-8") as record:
                        record.write(json.dumps(asdict(trainings[-1])) + "\n")
    show(trainings, console)


if __name__ == "__main__":
    main()
