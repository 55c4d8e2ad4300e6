"""A task's name in; generated pairs, a trained model, scores and pictures out: the whole line with nothing to bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from transduce.cli.display import at_level, save_pictures, show_explained, show_trained
from transduce.errors import InputError, nearest
from transduce.flow import Example
from transduce.recipe import override, parse
from transduce.training.experiment import train

Split = tuple[list[Example], list[Example], list[Example]]  # train, dev, test


@dataclass(frozen=True)
class Task:
    """An embedded task: where its pairs come from and the recipe that learns it."""

    about: str
    split: Callable[[], Split]
    recipe: dict[str, Any]
    shown: Sequence[str]  # inputs explained at the end


def _dates() -> Split:
    from transduce.synthetic.dates import split

    return split(100_000, 1_000, 2_000)


def _pronounce() -> Split:
    from transduce.synthetic.pronunciation import split

    return split()


_CHARACTERS = {"kind": "chars", "size": 8000}
_GRU = {"kind": "recurrent", "cell": "gru", "width": 256, "dropout": 0.1}
_ATTENTION = {"kind": "luong", "score": "mlp", "input_feeding": False}

TASKS = {
    "dates": Task(
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
                "validate_every": 500,
                "checkpoint_every": 500,
                "monitor": "exact",
                "patience": None,
                "log_every": 50,
            },
            "generation": {"strategy": "greedy", "max_length": 20},
            "evaluation": {"metrics": ["exact", "cer"]},
        },
        ("Dienstag, 3. März 2026", "le 3 mars 2026", "[en_US] 3/4/26", "[en_GB] 3/4/26"),
    ),
    "pronounce": Task(
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
                "validate_every": 500,
                "checkpoint_every": 500,
                "monitor": "exact",
                "patience": None,
                "log_every": 50,
            },
            "generation": {"beam": 5, "max_length": 40},
            "evaluation": {"metrics": ["exact", "per"], "references": "by_source"},
        },
        ("transduce", "attention", "knighthood"),
    ),
}


def find(task: str) -> Task:
    if task not in TASKS:
        raise InputError(f"no demo is called {task!r}", remedy=nearest(task, TASKS))
    return TASKS[task]


def write_pairs(task: str, folder: Path) -> list[Path]:
    """train.tsv, dev.tsv and test.tsv of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, examples in zip(("train", "dev", "test"), find(task).split(), strict=True):
        path = folder / f"{name}.tsv"
        path.write_text("".join(f"{one.source}\t{one.target}\n" for one in examples), encoding="utf-8")
        paths.append(path)
    return paths


def run_demo(task: str, folder: Path | None, settings: Sequence[str], console: Console) -> None:
    """Generates the pairs, trains, scores, explains."""
    chosen = find(task)
    folder = folder or Path("runs") / ("demo" if task == "dates" else task)
    console.print(f"[bold]{chosen.about}[/]", highlight=False)
    names = ("train", "dev", "test")
    data = dict(zip(names, map(str, write_pairs(task, folder / "data")), strict=True))
    recipe = parse(override({"data": data, **chosen.recipe}, settings), where="key=value")
    trained = train(recipe, folder, resume=True, console=console)
    if trained.outcome.reason != "interrupted":
        explained = [trained.model.explain(text, nbest=3, beam=5) for text in chosen.shown]
        maps = [at_level(one, "token", "mean", "mean") for one in explained if one.attention is not None]
        console.print()
        show_explained(explained[0], maps[0] if maps else None, console)
        save_pictures(explained, maps, folder / "attention.html", folder / "attention.png")
        console.print(f"\npictures: {folder}/attention.html, {folder}/attention.png", highlight=False)
    show_trained(trained, console)
