"""Time to quality: one training from the command to the test score, and where its seconds go.

    python -m benchmarks.speedrun dates
    python -m benchmarks.speedrun cmudict --data DATA

Each part is timed without the parts inside it, by the clock on the wall and by that of the processor (all threads of
this process, without other programs: on a busy machine this is the one to compare). A record is appended to
benchmarks/results/speedrun.jsonl.
"""

# ruff: noqa: E402 -- the imports are one of the parts that are timed

from __future__ import annotations

import time

BEGAN = (time.perf_counter(), time.process_time())  # before the imports, which are a part

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness import machine
from transduce.autoconfig import recipe_for
from transduce.cli.train import find_task, write_pairs
from transduce.recipe import Recipe, override, parse
from transduce.training import experiment, trainer
from transduce.training.distributed import pick_device

RECIPES = Path(__file__).parents[1] / "recipes"
FIRST = 5  # updates that may compile kernels or capture CUDA graphs
TINY = ("training.steps=12", "training.validate_every=6", "training.checkpoint_every=6", "evaluation.resamples=10")
Prepared = tuple[Recipe, str]  # and the command that does the same


@dataclass(frozen=True)
class Goal:
    """The score to reach on the test set, or on the development set, and the time for it."""

    metric: str
    value: float
    seconds: float
    higher_is_better: bool = True


def dates(data: Path, folder: Path, settings: list[str]) -> Prepared:
    names = ("train", "dev", "test")
    files = dict(zip(names, map(str, write_pairs("dates", folder / "pairs")), strict=True))
    recipe = parse(override({"data": files, **find_task("dates").recipe}, settings))
    return recipe, " ".join(["transduce demo", *settings])


def cmudict(data: Path, folder: Path, settings: list[str]) -> Prepared:
    train, test = data / "cmudict" / "train.tsv", data / "cmudict" / "test.tsv"
    settings = [f"data.test={test}", *settings]
    recipe = recipe_for(str(train), settings, "pronounce")
    return recipe, " ".join([f"transduce train {train} --task pronounce", *settings])


def multi30k(data: Path, folder: Path, settings: list[str]) -> Prepared:
    """The lower-cased, tokenised text of the published results, with its pieces joined to words again."""
    for path in (data / "multi30k" / "bpe").iterdir():
        (folder / path.name).write_text(path.read_text(encoding="utf-8").replace("@@ ", ""), encoding="utf-8")
    files = {name: f"{folder / name}.en,{folder / name}.de" for name in ("train", "val", "test2016")}
    scores = "evaluation.metrics=[bleu_tokenised, bleu]"
    settings = [f"data.dev={files['val']}", f"data.test={files['test2016']}", scores, *settings]
    recipe = recipe_for(files["train"], settings, "translate")
    return recipe, " ".join([f"transduce train {files['train']} --task translate", *settings])


def shakespeare(data: Path, folder: Path, settings: list[str]) -> Prepared:
    """The first nine tenths for training, the rest held out."""
    text = (data / "shakespeare" / "input.txt").read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    for name, part in (("train", text[:cut]), ("dev", text[cut:])):
        (folder / f"{name}.txt").write_text(part, encoding="utf-8")
    recipe = RECIPES / "shakespeare" / "transformer.yaml"
    files = [f"data.train={folder / 'train.txt'}", f"data.dev={folder / 'dev.txt'}"]
    settings = ["training.precision=auto", *settings]
    shown = recipe.relative_to(RECIPES.parent)
    return recipe_for(str(recipe), [*files, *settings]), " ".join([f"transduce train {shown}", *files, *settings])


RUNS: dict[str, tuple[Callable[[Path, Path, list[str]], Prepared], Goal]] = {
    "dates": (dates, Goal("exact", 99.8, 75)),
    "cmudict": (cmudict, Goal("exact", 79.0, 60)),
    "multi30k": (multi30k, Goal("bleu_tokenised", 41.0, 45)),
    "shakespeare": (shakespeare, Goal("loss", 1.47, 45, higher_is_better=False)),
}


@dataclass
class Stopwatch:
    """Seconds of each part, wall and processor, without the parts inside it."""

    parts: dict[str, list[float]] = field(default_factory=dict)
    updates: list[float] = field(default_factory=list)
    _last: tuple[float, float] = BEGAN
    _stack: list[str] = field(default_factory=lambda: ["import"])

    def _charge(self) -> None:
        """Charges the time since the last change to the present part."""
        now = (time.perf_counter(), time.process_time())
        seconds = self.parts.setdefault(self._stack[-1], [0.0, 0.0])
        for clock in (0, 1):
            seconds[clock] += now[clock] - self._last[clock]
        self._last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    @contextmanager
    def timing(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Inside, every call of a function or method belongs to this part."""
        original = getattr(owner, attribute)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            with self.part(name):
                result = original(*arguments, **named)
            if name == "training updates":
                self.updates.append(time.perf_counter() - began)
            return result

        setattr(owner, attribute, timed)
        try:
            yield
        finally:
            setattr(owner, attribute, original)

    @property
    def first_updates(self) -> float:
        """Seconds that the first updates took longer than others: compilation, CUDA graphs, first allocations."""
        usual = median(self.updates)
        return sum(max(0.0, seconds - usual) for seconds in self.updates[:FIRST])


PARTS = (
    (experiment.transfer, "choose_tokenizers", "tokenizers"),
    (experiment, "prepare_data", "reading and tokenising"),
    (experiment, "_build", "building the network"),
    (trainer.Trainer, "_step", "training updates"),
    (trainer.Trainer, "_validation_scores", "validating"),
    (trainer.TrainingState, "save", "checkpoints"),
    (experiment, "_evaluate", "testing"),
)


@dataclass(frozen=True)
class Record:
    """One speedrun."""

    name: str
    command: str
    machine: str
    seed: int
    updates: int
    reason: str  # why training ended
    score: float
    goal: Goal
    seconds: float
    training_seconds: float  # updates, validations, checkpoints
    first_updates: float
    parts: dict[str, list[float]]  # wall, processor
    tiny: bool


def run(name: str, data: Path, settings: list[str], tiny: bool) -> Record:
    prepare, goal = RUNS[name]
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as timers:
        with watch.part("choosing the recipe"):
            recipe, command = prepare(data, Path(folder), [*(TINY if tiny else ()), *settings])
            command = command.replace(f"{folder}/", "").replace(f"{data}/", "")
        for owner, attribute, part in PARTS:
            timers.enter_context(watch.timing(owner, attribute, part))
        with watch.part("other"):
            trained = experiment.train(recipe, Path(folder) / "run")
    if trained.outcome.reason == "interrupted":
        raise SystemExit(f"interrupted after update {trained.outcome.step}: no record")
    score = trained.outcome.best_value if goal.metric == "loss" else None
    if score is None:
        held_out = trained.scores.get("test", trained.scores["dev"])
        score = held_out.scores[goal.metric].value
    training = ("training updates", "validating", "checkpoints")
    return Record(
        name,
        command,
        machine(pick_device(recipe.training.device)),
        recipe.training.seed,
        trained.outcome.step,
        trained.outcome.reason,
        score,
        goal,
        sum(wall for wall, _ in watch.parts.values()),
        sum(watch.parts[part][0] for part in training),
        watch.first_updates,
        watch.parts,
        tiny,
    )


def show(record: Record, console: Console) -> None:
    table = Table("part", "seconds", "processor", "share", title=escape(record.command))
    for part, (wall, processor) in sorted(record.parts.items(), key=lambda item: -item[1][0]):
        table.add_row(part, f"{wall:.1f}", f"{processor:.1f}", f"{wall / record.seconds:.0%}")
    console.print(table)
    goal = record.goal
    console.print(
        f"{goal.metric} {record.score:.2f} (goal {goal.value:g}) after {record.updates:,} updates ({record.reason}); "
        f"{record.seconds:.1f} seconds, {record.training_seconds:.1f} of them training (goal {goal.seconds:g}); "
        f"the first updates took {record.first_updates:.1f} seconds longer than others",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speedrun", description=__doc__)
    parser.add_argument("name", choices=list(RUNS))
    parser.add_argument("settings", nargs="*", help="key=value changes of the recipe, e.g. training.seed=2")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cmudict, multi30k, shakespeare")
    parser.add_argument("--tiny", action="store_true", help="12 updates, which only check that everything works")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/speedrun.jsonl"))
    args = parser.parse_args()
    record = run(args.name, args.data, args.settings, args.tiny)
    show(record, Console(width=140))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


if __name__ == "__main__":
    main()
