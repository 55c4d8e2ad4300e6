"""Commands about run directories: list, push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transduce.cli.options import open_console
from transduce.errors import InputError

if TYPE_CHECKING:
    from transduce.run import Run


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds runs, at any depth.")] = Path(
        "runs"
    ),
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the runs below a folder: model, scores, updates, time of training, size on disk.

    Examples:

        transduce list

        transduce list experiments --json
    """
    from rich.markup import escape
    from rich.table import Table

    from transduce.storage import json_line, size_text
    from transduce.training.report import duration

    found = [describe_run(run) for run in find_runs(folder)]
    if json:
        for one in found:
            print(json_line(one))
        return
    table = Table("run", "model", "parameters", "scores", "updates", "time", "size", box=None, header_style="bold")
    for one in found:
        scores = "  ".join(f"{name} {value:.2f}" for name, value in one["scores"].items())
        state = f"{one['updates']:,}" + ("" if one["finished"] else ", unfinished")
        count = "" if one["parameters"] is None else f"{one['parameters']:,}"
        cells = (one["run"], one["model"], count, scores, state, duration(one["seconds"]), size_text(one["bytes"]))
        table.add_row(*map(escape, cells))
    console = open_console()
    console.print(table if found else f"no runs in {folder}", highlight=False)


def find_runs(folder: Path) -> list[Run]:
    """The run directories at or below a folder, by name."""
    from transduce.run import Run

    if not folder.is_dir():
        raise InputError("there is no such folder", where=str(folder), remedy="give the folder that holds your runs")
    return [Run(file.parent) for file in sorted(folder.rglob("recipe.yaml")) if (file.parent / "checkpoints").is_dir()]


def describe_run(run: Run) -> dict[str, Any]:
    """What `transduce list` shows of a run. Scores are those of the test set, else of the development set."""
    from transduce.training.report import read_log

    metrics = run.metrics()
    held_out = metrics.get("test") or metrics.get("dev") or {}
    log = read_log(run.log)
    recipe = run.recorded_recipe().model
    parts = (recipe.encoder, recipe.decoder, recipe.head)
    return {
        "run": str(run.folder),
        "model": " -> ".join(str(part["kind"]) for part in parts if part is not None),
        "parameters": metrics.get("parameters"),
        "scores": {name: one["value"] for name, one in held_out.get("scores", {}).items()},
        "updates": max((entry["step"] for entry in log), default=0),
        "seconds": max((entry.get("seconds", 0) for entry in log), default=0),
        "finished": bool(metrics),
        "bytes": sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file()),
    }


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory written by `transduce train`.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the Hugging Face Hub: USER/NAME.")],
    to: Annotated[
        str, typer.Option(help="huggingface: files that transformers and `transduce generate NAME` read; or bundle.")
    ] = "huggingface",
    licence: Annotated[
        str | None, typer.Option(metavar="ID", help="Licence of the weights for the model card, such as mit.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the files to this folder; upload nothing.")
    ] = None,
) -> None:
    """Upload a trained model to the Hugging Face Hub, with a model card: data, scores, recipe, licence, limits.

    Needs the extra `transduce[hub]`, and a token: `hf auth login`.

    Examples:

        transduce push runs/en-de my-name/en-de --licence mit

        transduce push runs/en-de my-name/en-de --dry-run files
    """
    from transduce.interop.hub import upload_run

    print(upload_run(run, name, to, licence=licence, private=private, folder=dry_run))
