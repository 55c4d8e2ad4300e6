"""Demo tasks with generated data, and the command that trains, scores and explains them: demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transduce.cli.options import Overrides, open_console
from transduce.errors import InputError, nearest
from transduce.storage import replace_file, staged_folder

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.flow import Example

Splits = tuple["list[Example]", "list[Example]", "list[Example]"]  # train, dev, test


@dataclass(frozen=True)
class DemoTask:
    """A demo task: the function that generates its pairs, and its recipe."""

    description: str
    splits: Callable[[], Splits]
    recipe: dict[str, Any]
    explained: Sequence[str]  # inputs that are explained at the end


def _dates() -> Splits:
    from transduce.synthetic.dates import split

    return split(100_000, 1_000, 2_000)


def _pronounce() -> Splits:
    from transduce.synthetic.words import split_pronunciations

    return split_pronunciations()


_CHARACTERS = {"kind": "chars", "size": 8000}
_GRU = {"kind": "recurrent", "cell": "gru", "width": 256, "dropout": 0.1}
_ATTENTION = {"kind": "luong", "score": "mlp", "input_feeding": False}
_TRAINING = {
    "validate_every": 500,
    "checkpoint_every": 500,
    "monitor": "exact",
    "patience": None,
    "log_every": 50,
}

TASKS = {
    "dates": DemoTask(
        "written dates in many languages and styles -> ISO 8601",
        _dates,
        {
            "tokens": {"source": _CHARACTERS, "target": _CHARACTERS},
            "model": {
                "encoder": {**_GRU, "dropout": 0.0},
                "decoder": {**_GRU, "width": 128, "dropout": 0.0, "context": _ATTENTION},
            },
            "training": {
                "steps": 2000,
                "batch_tokens": 2048,
                "optimiser": {"learning_rate": 4e-3},
                "schedule": {"kind": "linear", "warmup": 100},
                **_TRAINING,
            },
            "generation": {"strategy": "greedy", "max_length": 20},
            "evaluation": {"metrics": ["exact", "cer"]},
        },
        ("Dienstag, 3. März 2026", "le 3 mars 2026", "[en_US] 3/4/26", "[en_GB] 3/4/26"),
    ),
    "pronounce": DemoTask(
        "English words -> phones",
        _pronounce,
        {
            "tokens": {"source": _CHARACTERS, "target": {"kind": "words", "size": 100}},
            "model": {"encoder": _GRU, "decoder": {**_GRU, "context": _ATTENTION}},
            "training": {
                "steps": 1500,
                "batch_tokens": 4096,
                "optimiser": {"learning_rate": 3e-3},
                "schedule": {"kind": "cosine", "warmup": 100},
                **_TRAINING,
            },
            "generation": {"beam": 5, "max_length": 40},
            "evaluation": {"metrics": ["exact", "per"], "references": "by_source"},
        },
        ("transduce", "attention", "knighthood"),
    ),
}


def demo(
    task: Annotated[
        str,
        typer.Option(help="dates: written dates in many languages to ISO 8601; pronounce: English words to phones."),
    ] = "dates",
    run: Annotated[Path | None, typer.Option(help="Run directory to write. [default: runs/demo or runs/TASK]")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Only write the pairs of the task to this folder, as TSV.")
    ] = None,
    settings: Overrides = None,
) -> None:
    """Train, evaluate and explain a model on a built-in task, in a few minutes.

    Examples:

        transduce demo

        transduce demo --task pronounce

        transduce demo --task dates --write data/dates
    """
    console = open_console()
    if write is not None:
        for path in write_pairs(task, write):
            console.print(str(path), highlight=False)
        return
    run_demo(task, run, settings or [], console)


def find_task(name: str) -> DemoTask:
    if name not in TASKS:
        raise InputError(f"no demo task is called {name!r}", where="--task", remedy=nearest(name, TASKS))
    return TASKS[name]


def write_pairs(task: str, folder: Path) -> list[Path]:
    """Writes train.tsv, dev.tsv and test.tsv of a task."""
    names = [f"{name}.tsv" for name in ("train", "dev", "test")]
    with staged_folder(folder) as part:
        for name, examples in zip(names, find_task(task).splits(), strict=True):
            replace_file(part / name, "".join(f"{one.source}\t{one.target}\n" for one in examples))
    return [folder / name for name in names]


def run_demo(task: str, folder: Path | None, overrides: Sequence[str], console: Console) -> None:
    """Generates the pairs, trains and evaluates a model, and explains some of its outputs."""
    from transduce.cli.display import attention_map, save_pictures, show_explained, show_trained
    from transduce.recipe import override, parse
    from transduce.training.experiment import train

    chosen = find_task(task)
    folder = folder or Path("runs") / ("demo" if task == "dates" else task)
    console.print(f"[bold]{chosen.description}[/]", highlight=False)
    names = ("train", "dev", "test")
    data = dict(zip(names, map(str, write_pairs(task, folder / "data")), strict=True))
    recipe = parse(override({"data": data, **chosen.recipe}, overrides), where="key=value")
    trained = train(recipe, folder, resume=True, console=console)
    if trained.outcome.reason != "interrupted":
        explained = [trained.model.explain(text, nbest=3, beam=5) for text in chosen.explained]
        maps = [attention_map(one, "token", "mean", "mean") for one in explained if one.attention is not None]
        console.print()
        show_explained(explained[0], maps[0] if maps else None, console)
        save_pictures(explained, maps, folder / "attention.html", folder / "attention.png", folder)
        console.print(f"\npictures: {folder}/attention.html, {folder}/attention.png", highlight=False)
    show_trained(trained, console)
