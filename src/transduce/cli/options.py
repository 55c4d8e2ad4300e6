"""Arguments and options that several commands share, and their conversion to values."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, cast

import typer

from transduce.errors import InputError, nearest
from transduce.storage import open_text

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.inference import Model, ensemble
    from transduce.inference.lowering import Precision

Policy = Literal["wait_k", "alignatt"]  # of simultaneous translation
STANDARD_INPUT = "-"
SEARCH, ENSEMBLE, OUTPUT = "Search", "Ensemble", "Output"  # panels of --help
PERFORMANCE, LOADING = "Performance", "Loading"

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory written by `transduce train`, a bundle, or a Hub model.")
]
RunsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Run directory written by `transduce train`, a bundle, or a Hub model; RUN1,RUN2 is an ensemble.",
    ),
]
InputFile = Annotated[
    str, typer.Argument(metavar="FILE", help="Text file with one input per line; - reads standard input.")
]
Documents = Annotated[
    Path, typer.Argument(metavar="DOCUMENTS", help="Text file with one document per line, or a folder of files.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as training.steps=5000.")
]
Output = Annotated[Path | None, typer.Option(help="Output file; by default standard output.", rich_help_panel=OUTPUT)]
Sample = Annotated[
    bool, typer.Option("--sample", help="Sample from the model instead of searching.", rich_help_panel=SEARCH)
]
Beam = Annotated[
    int | None, typer.Option(help="Beam size; 1 is greedy search. [default: as in the recipe]", rich_help_panel=SEARCH)
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the recipe's `generation` section, such as length_penalty=0.6. May be repeated.",
        rich_help_panel=SEARCH,
    ),
]
Combination = Annotated[
    str | None,
    typer.Option(
        metavar="mean|log_linear",
        help="Ensembles: arithmetic mean of the probabilities, or geometric mean. [default: mean]",
        rich_help_panel=ENSEMBLE,
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="W1,W2", help="Ensembles: weights of the runs. [default: equal ones]", rich_help_panel=ENSEMBLE
    ),
]
Layer = Annotated[str, typer.Option(help="Decoder layer: a number from 0, `last`, or `mean` of all layers.")]
Head = Annotated[str, typer.Option(help="Attention head: a number from 0, or `mean` of all heads.")]
WarningsFlag = Annotated[
    bool,
    typer.Option(
        "--warnings/--no-warnings",
        help="Failure detectors: repetition, low confidence, truncation; with --json also detached attention and "
        "dropped words of the source.",
        rich_help_panel=OUTPUT,
    ),
]
Intervene = Annotated[
    list[str] | None,
    typer.Option(
        help="Change the model for this call, once or several times: mask-token:2, mask-head:cross:1.3, "
        "mask-layer:cross:1, skip-layer:decoder:1, uniform:cross:1.3, permute:cross:all, "
        "force-attention:cross:all:2@0, force-prefix:TEXT, force-token:2:TOKEN, swap-memory:SOURCE, "
        "swap-summary:SOURCE, swap-row:2:SOURCE."
    ),
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:N or mps.", rich_help_panel=PERFORMANCE)]
TrustUserCode = Annotated[
    bool,
    typer.Option(
        "--trust-user-code",
        help="Run the custom Python code that the recipe names (kind: file:Class). Only for runs that you trust.",
        rich_help_panel=LOADING,
    ),
]


_kept: dict[tuple[Any, ...], Model] = {}  # models by how they were loaded, where they are kept
_keeps: list[bool] = [False]


def keep_models() -> None:
    """From now on, models are loaded once: for workers that do many shards."""
    _keeps[0] = True


def forget_models() -> None:
    _keeps[0] = False
    _kept.clear()


def _loaded(run: Path, **options: Any) -> Model:
    from transduce.inference import load

    if not _keeps[0]:
        return load(run, **options)
    key = run, *(str(value) for value in options.values())
    if key not in _kept:
        _kept[key] = load(run, **options)
    return _kept[key]


def load_model(run: Path, device: str, trust_user_code: bool, precision: str | None = None) -> Model:
    return _loaded(run, device=device, precision=cast("Precision | None", precision), trust_user_code=trust_user_code)


def load_ensemble(
    runs: Path,
    device: str,
    trust_user_code: bool,
    combination: str | None,
    weights: str | None,
    precision: str | None = None,
) -> Model:
    """A run, or several as RUN1,RUN2 with the options of an ensemble."""
    return _loaded(
        runs,
        device=device,
        precision=cast("Precision | None", precision),
        trust_user_code=trust_user_code,
        combination=cast("ensemble.Combination | None", combination),
        weights=None if weights is None else numbers(weights, "--weights", remedy="write one number per run: 1,1,2"),
    )


def numbers(text: str, option: str, *, remedy: str) -> list[float]:
    """Numbers that are separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{text!r} are not numbers", where=option, remedy=remedy) from None


Language = Annotated[
    str | None,
    typer.Option("--to", metavar="LANGUAGE", help="Language of the outputs, for a run with several languages."),
]


def check_language(model: Model, language: str | None) -> None:
    """Refuses a language that the model has no tag for."""
    if language is not None and language not in model.source.languages:
        known = model.source.languages
        raise InputError(
            f"this run has no language {language!r}" if known else "this run has no languages",
            where="--to",
            remedy=nearest(language, known) if known else "leave out --to",
        )


def generation_settings(items: list[str] | None, **options: Any) -> dict[str, Any]:
    """The settings of --set and of options such as --beam; an option that was given wins."""
    from transduce.recipe import override

    return {**override({}, items or []), **{name: value for name, value in options.items() if value is not None}}


def check_policy(wait_k: int | None, alignatt: int | None) -> tuple[Policy, int] | None:
    """The policy of simultaneous translation and its number; None: whole sources."""
    if wait_k is not None and alignatt is not None:
        raise InputError("two policies of simultaneous translation", remedy="give --wait-k or --alignatt")
    if wait_k is not None:
        return "wait_k", wait_k
    return None if alignatt is None else ("alignatt", alignatt)


def layer_and_head(layer: str, head: str) -> list[int | str]:
    """Numbers as integers, names such as `mean` as they are."""
    return [int(choice) if choice.lstrip("-").isdigit() else choice for choice in (layer, head)]


@contextmanager
def imports_without_collection() -> Iterator[None]:
    """Inside, torch is imported without garbage collection, which would take a fifth of the time of the imports.

    Modules live as long as the process: afterwards the collector does not look at them either.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_console(quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(quiet=quiet)


@contextmanager
def open_output(output: Path | None, input_file: str) -> Iterator[TextIO]:
    """The output file, or standard output. An input file is never overwritten.

    The file appears when it is complete. If the input is standard input, which may stay open, the file grows at once.
    """
    if output is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe early, as `| head` does
            discard_output()
            raise typer.Exit(141) from None
        return
    if any(output.exists() and Path(part).exists() and output.samefile(part) for part in input_file.split(",")):
        raise InputError("the output file is also an input file", where=str(output), remedy="write to another file")
    with open_text(output, grows=input_file == STANDARD_INPUT) as stream:
        yield stream


def discard_output() -> None:
    """Discards what standard output could not write, which Python would try once more at its exit."""
    with suppress(OSError, ValueError):  # no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def source_windows(model: Model, file: str) -> Iterator[list[str]]:
    """The sources of an input, in windows: a file or a folder that the model reads, or the lines of a text file."""
    from transduce.data.readers.corpus import in_windows

    files = model.source_encoding.sources_in(file)  # the argument itself is a source, or a folder of sources
    if not files and not model.source_encoding.reads_text and Path(file).is_dir():
        raise InputError(
            "this folder has no file that the model can read",
            where=file,
            remedy="give a folder of files of the kind that it was trained on, or a file of lines",
        )
    return in_windows(files) if files else _line_windows(model, file)


def _line_windows(model: Model, file: str) -> Iterator[list[str]]:
    """The lines of a file, or of standard input. File names in a line are relative to the folder of that file."""
    from transduce.data.readers.corpus import read_windows, resolve_paths

    reads = next((corpus.modalities for corpus in model.recipe.data.train), ())
    folder = Path() if file == "-" else Path(file).parent
    return ([resolve_paths(line, folder, reads) for line in lines] for lines in read_windows(file))
