"""Commands that train models: train, compare, demo."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from transduce.cli.options import Overrides, TrustUserCode, imports_without_collection, open_console
from transduce.errors import InputError, nearest
from transduce.storage import replace_file, staged_folder

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.autoconfig import Plan
    from transduce.autoconfig.sizes import PlannedEnsemble
    from transduce.flow import Example
    from transduce.recipe import Recipe

MEMBERS = 5  # of the ensemble of `--effort best`
Splits = tuple["list[Example]", "list[Example]", "list[Example]"]  # train, dev, test


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Training pairs (TSV, CSV, JSONL, JSON, Parquet, TMX, ...; SOURCE,TARGET text files; - for standard "
            "input), or a recipe.yaml.",
        ),
    ],
    settings: Overrides = None,
    run: Annotated[
        Path | None,
        # torchrun takes `--run` as an abbreviation of its own `--run-path`: use --run-dir with it.
        typer.Option("--run", "--run-dir", help="Run directory to write. [default: runs/NAME]"),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE,TARGET", help="Columns by name (nested: translation.de) or position. Default: found."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Task, where no recipe is given; see the list above.")] = "generate",
    effort: Annotated[
        str,
        typer.Option(
            metavar="quick|normal|best",
            help="quick: a fifth of the updates. best: compare several recipes on the development set, and train an "
            "ensemble of the best.",
        ),
    ] = "normal",
    ensemble: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train N models with different seeds, which generate together as one. [default: 1; for few words of "
            "--task pronounce or transliterate what --plan says]",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run from its last checkpoint, with its own recipe.")
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="With --resume: recipe key that may differ from the run's, e.g. training.clip; for changed data files "
            "data.train or data.dev. May be repeated.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time for training: network, updates and schedule are fitted to it. With --ensemble or --effort best: "
            "for each network. [default: 10 on a CPU, in all where an ensemble is chosen]"
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print the recipe that is chosen, the reasons and the expected time.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    trust_user_code: TrustUserCode = False,
) -> None:
    """Train a model on pairs, with a recipe or with settings chosen from the data.

    Examples:

        transduce train pairs.tsv

        transduce train pairs.tsv --plan

        transduce train pairs.tsv --minutes 30

        transduce train train.en,train.de --run runs/de training.steps=5000

        transduce train opus.jsonl --columns translation.de,translation.en

        transduce train recipe.yaml data.train=pairs.tsv --resume

        transduce train pairs.tsv --ensemble 5

        transduce train pairs.tsv --effort best

        torchrun --nproc-per-node 2 -m transduce train recipe.yaml --run-dir runs/two

    Tasks, and the columns of their TSV:

    - generate: text, text; tokenizers and model are chosen from the data
    - translate: sentence, sentence in another language
    - pronounce: word, phones
    - transliterate: word, the word in another script
    - inflect: lemma, features, form
    - summarise: text, summary
    - answer: context, question, answer
    - converse: previous turns, the oldest first, and the next turn
    - describe: attributes, a sentence that expresses them
    - classify: text, label
    - tag: words, one tag per word
    - entail: premise, hypothesis, label
    - embed: text, text of the same meaning
    - lm: running text, for a language model
    - mask: lines of text, for a masked language model
    - caption: image file, caption
    - classify-images: image file, label
    - transcribe: audio file, text
    - classify-audio: audio file, label
    - vqa: image file, question, answer
    - caption-videos: video file, text
    - classify-videos: video file, label
    - draw: text, image tokens (see `transduce encode-images`)
    """
    with imports_without_collection():
        from transduce.autoconfig import continued_recipe, plan_for
        from transduce.cli.display import show_plan, show_recipe
        from transduce.recipe.registry import check_user_code
        from transduce.run import Run
        from transduce.training.ensemble_run import NORMAL, saved_plan, sharing_time, time_of_trainings, with_effort

    console = open_console(quiet)
    source, settings = _with_second_file(source, settings or [])
    if source == "-":
        source = _keep_input(run or Path("runs/stdin"))
    if columns is not None:
        settings = [f"data.columns={columns}", *settings]
    if plan:
        if Path(source).suffix in (".yaml", ".yml"):
            problem = "--plan prints the recipe that is chosen for a data file, and a recipe was given"
            raise InputError(problem, where=source, remedy="give a data file, or leave out --plan")
        chosen = plan_for(source, settings, task, minutes)
        check_user_code(chosen.recipe, source, trusted=trust_user_code, overrides=settings)
        if not _chooses_members(ensemble, effort):
            chosen = replace(chosen, ensemble=None)
        show_plan(chosen, _seconds_per_update(chosen), console)
        return
    name = Path(source.partition(",")[0]).name.partition(".")[0] or "latest"
    folder = run or Path("runs") / name
    recipe = continued_recipe(Run(folder), source, settings, minutes) if resume else None
    planned = None
    if recipe is None:
        given = settings if minutes is None else [*settings, f"training.minutes={minutes}"]
        recipe, planned = _recipe_and_ensemble(source, settings, task, minutes)
        recipe = with_effort(recipe, effort, given)
    check_user_code(recipe, source, trusted=trust_user_code, overrides=settings)
    networks: Sequence[str] = (NORMAL,)
    if planned is not None and _chooses_members(ensemble, effort):
        planned = (saved_plan(Run(folder)) if resume else None) or planned
        ensemble, networks = planned.members, planned.networks
        recipe = sharing_time(recipe, ensemble)
        console.print(f"{planned.reason} (--ensemble 1 trains one)", highlight=False)
    if Path(source).suffix not in (".yaml", ".yml") and os.environ.get("RANK", "0") == "0":
        show_recipe(recipe, console)
    if effort == "best" or (ensemble is not None and ensemble != 1):
        members = MEMBERS if ensemble is None else ensemble
        time = time_of_trainings(recipe, members, search=effort == "best")
        if time and members > 1:  # fewer are refused
            console.print(time, highlight=False)
        _train_ensemble(recipe, folder, members, effort, networks, resume, allow_change or [], console)
    else:
        _train(recipe, folder, resume, allow_change or [], console)


def _chooses_members(ensemble: int | None, effort: str) -> bool:
    """Whether the number of networks is chosen: the command gives none, and is no process of several."""
    return ensemble is None and effort == "normal" and "WORLD_SIZE" not in os.environ


def _recipe_and_ensemble(
    source: str, settings: Sequence[str], task: str, minutes: float | None
) -> tuple[Recipe, PlannedEnsemble | None]:
    """The recipe of a file, which is for one network, or what is chosen for data."""
    from transduce.autoconfig import plan_for, recipe_for

    if Path(source).suffix in (".yaml", ".yml"):
        return recipe_for(source, settings, task, minutes), None
    plan = plan_for(source, settings, task, minutes)
    return plan.recipe, plan.ensemble


def _seconds_per_update(plan: Plan) -> float | None:
    """Measured with random tokens, for pairs of texts; None for other tasks."""
    from transduce.recipe.build import complete_recipe
    from transduce.training.distributed import pick_device
    from transduce.training.resolve import seconds_per_update

    if not plan.text_pairs:
        return None
    device = pick_device(plan.recipe.training.device)
    (source, source_length), (target, target_length) = plan.tokens
    if plan.recipe.tokens.shared:
        source = target = max(source, target)
    recipe = complete_recipe(plan.recipe)
    return seconds_per_update(recipe, device, (source, target), (source_length, target_length))


def _with_second_file(source: str, settings: list[str]) -> tuple[str, list[str]]:
    """`a.en a.de` stands for the parallel files `a.en,a.de`."""
    from transduce.data.readers.files import is_table

    files = [item for item in settings if "=" not in item]
    if not files:
        return source, settings
    whole = any(is_table(name) or Path(name).suffix in (".yaml", ".yml") for name in (source, files[0]))
    if len(files) > 1 or whole or not Path(files[0]).is_file():
        remedy = f"parallel files: {source},{files[0]}; further data: data.dev={files[0]}; settings: key.path=value"
        raise InputError(f"{files[0]!r} is not a setting", remedy=remedy)
    return f"{source},{files[0]}", [item for item in settings if "=" in item]


def _keep_input(run: Path) -> str:
    """Stores standard input beside the run, since training reads its data more than once."""
    from transduce.data.readers.files import stored_lines
    from transduce.storage import make_folder, open_atomic

    path = make_folder(run.parent) / f"{run.name}.tsv"
    with open_atomic(path) as stream:
        stream.writelines(line + b"\n" for _, line in stored_lines("-"))
    return str(path)


def _train(recipe: Recipe, run: Path, resume: bool, allow_changes: list[str], console: Console) -> None:
    """Trains a recipe, and shows its scores. Raises `typer.Exit` after a signal."""
    from transduce.cli.display import show_trained
    from transduce.kernels.native.library import keep_freed_memory
    from transduce.training.experiment import train as run_training

    keep_freed_memory()
    trained = run_training(recipe, run, resume=resume, allow_changes=allow_changes, console=console)
    if trained.scores or trained.outcome.reason == "interrupted":  # with several processes, only rank 0 has scores
        show_trained(trained, console)
    if trained.outcome.reason == "interrupted":
        raise typer.Exit(128 + (trained.outcome.signal or 2))


def _train_ensemble(
    recipe: Recipe,
    run: Path,
    members: int,
    effort: str,
    networks: Sequence[str],
    resume: bool,
    allow_changes: list[str],
    console: Console,
) -> None:
    """Trains an ensemble, after a search for its recipe with the effort `best`. Raises `typer.Exit` after a signal."""
    from transduce.cli.display import show_ensemble
    from transduce.kernels.native.library import keep_freed_memory
    from transduce.training.ensemble_run import train_best, train_ensemble

    keep_freed_memory()
    train_members = train_best if effort == "best" else partial(train_ensemble, networks=networks)
    trained = train_members(recipe, run, members, resume=resume, allow_changes=allow_changes, console=console)
    show_ensemble(trained, console)
    if trained.model is None:
        raise typer.Exit(128 + (trained.signal or 2))


def distil(
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="Trained run, folder of an ensemble, or RUN1,RUN2.")
    ],
    settings: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run directory of the student. [default: TEACHER-distilled]")
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            metavar="word|sequence|both",
            help="Learn the distributions of the teacher for each target token, or its outputs, or both.",
        ),
    ] = "word",
    data: Annotated[
        str | None, typer.Option(metavar="PAIRS", help="Training pairs. [default: those of the teacher]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    trust_user_code: TrustUserCode = False,
) -> None:
    """Distil a model or an ensemble into one model: by default of the size of the teacher, or of its first member.

    Examples:

        transduce distil runs/five

        transduce distil runs/five --level both --run runs/one training.steps=5000

        transduce distil runs/large model.encoder.layers=2 model.decoder.layers=1
    """
    from transduce.recipe.registry import check_user_code
    from transduce.transfer.synthetic_pairs import Level, student_recipe

    console = open_console(quiet)
    folder = run or Path(f"{teacher.partition(',')[0].rstrip('/')}-distilled")
    recipe = student_recipe(teacher, folder, cast(Level, level), data, settings or [], console)
    check_user_code(recipe, teacher, trusted=trust_user_code, overrides=settings or [])
    _train(recipe, folder, resume, [], console)


def edit_recipe(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    settings: Overrides = None,
) -> None:
    """Change keys of the recipe of a trained run, or restore a recipe.yaml that was changed by hand.

    Weights are bound to their recipe: a recipe.yaml that was edited or damaged is refused.

    Examples:

        transduce edit-recipe runs/demo generation.beam=8

        transduce edit-recipe runs/demo
    """
    from transduce.run import Run, lock_run
    from transduce.training.distributed import Processes

    with lock_run(run, Processes()):
        changes = Run(run).edit_recipe(settings or [])
    for line in changes or ["recipe.yaml is the one that the weights were saved with"]:
        open_console().print(line, highlight=False, markup=False, soft_wrap=True)


def compare(
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="CANDIDATES", help="Recipes to train, trained runs, and key=value changes to all recipes."
        ),
    ],
    folder: Annotated[Path, typer.Option(help="Folder for new runs, table and plot.")] = Path("runs/compare"),
    data: Annotated[str | None, typer.Option(help="Test pairs. [default: the test set of the recipe]")] = None,
    equal: Annotated[
        str, typer.Option(help="Budget that all models share: none, parameters or minutes (of training).")
    ] = "none",
    minutes: Annotated[
        float | None, typer.Option(help="With --equal minutes: minutes of training for each model.")
    ] = None,
    trust_user_code: TrustUserCode = False,
) -> None:
    """Compare several models on the same data: a table with significance tests, and a plot of quality by length.

    Example:

        transduce compare bottleneck.yaml attention.yaml transformer.yaml data.train=pairs.tsv --equal parameters
    """
    from transduce.evaluation.comparison import compare as run_comparison
    from transduce.evaluation.comparison import draw_table
    from transduce.recipe import load
    from transduce.recipe.registry import check_user_code

    console = open_console()
    names = [item for item in candidates if "=" not in item]
    overrides = [item for item in candidates if "=" in item]
    if equal not in ("none", "parameters", "minutes"):
        raise InputError(f"unknown budget {equal!r}", where="--equal", remedy="none, parameters or minutes")
    for name in names:
        if Path(name).suffix in (".yaml", ".yml"):
            check_user_code(load(name, overrides), name, trusted=trust_user_code, overrides=overrides)
    comparison = run_comparison(
        names, folder=folder, overrides=overrides, data=data, equal=cast(Any, equal), minutes=minutes, console=console
    )
    draw_table(comparison, console)
    console.print(f"table, numbers and plot: {folder}/compare.md, compare.json, compare.png", highlight=False)


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
                "encoder": {**_GRU, "width": 128, "dropout": 0.0},
                "decoder": {**_GRU, "width": 128, "dropout": 0.0, "context": _ATTENTION},
            },
            "training": {
                "steps": 2600,
                "batch_tokens": 2048,
                "optimiser": {"learning_rate": 6e-3},
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
