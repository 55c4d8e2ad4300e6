"""Pairs or recipes in, trained runs out: train, compare, demo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from transduce.cli.options import open_console
from transduce.errors import InputError


def train(
    source: Annotated[str, typer.Argument(help="Pairs (TSV, JSONL, Parquet; or SOURCE,TARGET), or a recipe.yaml.")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe.")] = None,
    run: Annotated[
        Path | None,
        # torchrun takes `--run` for its own `--run-path`: under it, write --run-dir.
        typer.Option("--run", "--run-dir", help="Where the run is written; by default runs/NAME."),
    ] = None,
    task: Annotated[str, typer.Option(help="What is learned, without a recipe: see the list above.")] = "generate",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Train a model on pairs, with a recipe or without one.

    Examples:

        transduce train pairs.tsv

        transduce train train.en,train.de --run runs/de training.steps=5000

        transduce train recipe.yaml data.train=pairs.tsv --resume

        torchrun --nproc-per-node 2 -m transduce train recipe.yaml --run-dir runs/two

    Tasks, and the columns of their TSV:

    - generate: text, text; tokens and model by the look of them
    - translate: sentence, sentence in another language
    - pronounce: word, phones
    - transliterate: word, the word in another script
    - inflect: lemma, features, form
    - summarise: text, summary
    - answer: context, question, answer
    - converse: turns, the oldest first, and the next turn
    - describe: attributes, a sentence that says them
    - classify: text, label
    - tag: words, a tag for each
    - entail: premise, hypothesis, label
    - embed: text, text of the same meaning
    - lm: running text, for a language model
    - mask: lines of text, for a masked language model
    - caption: picture, caption
    - classify-images: picture, label
    - transcribe: recording, text
    - vqa: picture, question, answer
    - caption-videos: film, text
    - classify-videos: film, label
    - draw: text, colours of pixels (see pixels)
    """
    from transduce.autoconfig import recipe_for
    from transduce.cli.display import show_recipe, show_trained
    from transduce.kernels.native.memory import keep_freed_memory
    from transduce.training.experiment import train as run_training

    keep_freed_memory()
    console = open_console(quiet)
    name = Path(source.partition(",")[0]).name.partition(".")[0] or "latest"
    recipe = recipe_for(source, settings or [], task)
    if Path(source).suffix not in (".yaml", ".yml") and os.environ.get("RANK", "0") == "0":
        show_recipe(recipe, console)
    trained = run_training(recipe, run or Path("runs") / name, resume=resume, console=console)
    if trained.scores or trained.outcome.reason == "interrupted":  # only the first of several processes has scores
        show_trained(trained, console)
    if trained.outcome.reason == "interrupted":
        raise typer.Exit(128 + (trained.outcome.signal or 2))


def compare(
    candidates: Annotated[
        list[str], typer.Argument(help="Recipes to train and runs to take; key=value changes recipes.")
    ],
    folder: Annotated[Path, typer.Option(help="Where new runs, table and picture go.")] = Path("runs/compare"),
    data: Annotated[str | None, typer.Option(help="Pairs to score on; by default the recipe's test set.")] = None,
    equal: Annotated[str, typer.Option(help="none, parameters or minutes")] = "none",
    minutes: Annotated[float | None, typer.Option(help="Training time of each, with --equal minutes.")] = None,
) -> None:
    """Train or take several models on the same data: one table, one picture of quality against source length.

    Example:

        transduce compare bottleneck.yaml attention.yaml transformer.yaml data.train=pairs.tsv --equal parameters
    """
    from transduce.evaluation.comparison import compare as run_comparison
    from transduce.evaluation.comparison import draw_table

    console = open_console()
    names = [item for item in candidates if "=" not in item]
    changes = [item for item in candidates if "=" in item]
    if equal not in ("none", "parameters", "minutes"):
        raise InputError(f"--equal {equal}?", remedy="none, parameters or minutes")
    comparison = run_comparison(
        names, folder=folder, overrides=changes, data=data, equal=cast(Any, equal), minutes=minutes, console=console
    )
    draw_table(comparison, console)
    console.print(f"table, numbers and picture: {folder}/compare.md, compare.json, compare.png", highlight=False)


def demo(
    task: Annotated[
        str, typer.Option(help="dates: written dates in many languages to ISO 8601; pronounce: words to phones")
    ] = "dates",
    run: Annotated[
        Path | None, typer.Option(help="Where the run is written; by default runs/demo or runs/TASK.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Only write the task's pairs into this folder, as TSV.")] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe.")] = None,
) -> None:
    """Train on an embedded task, score it, explain it: the whole line in a few minutes.

    Examples:

        transduce demo

        transduce demo --task pronounce

        transduce demo --task dates --write data/dates
    """
    from transduce.cli.demo import run_demo, write_pairs

    console = open_console()
    if write is not None:
        for path in write_pairs(task, write):
            console.print(str(path), highlight=False)
        return
    run_demo(task, run, settings or [], console)
