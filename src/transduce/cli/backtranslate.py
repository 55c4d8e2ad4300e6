"""The command `backtranslate`: synthetic pairs for back-translation, self-training and distillation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import (
    OUTPUT,
    Beam,
    Device,
    RunsArgument,
    Sample,
    Settings,
    TrustUserCode,
    generation_settings,
    load_ensemble,
)


def backtranslate(
    run: RunsArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Monolingual text, one sentence per line.")],
    output: Annotated[
        Path, typer.Option(help="Pairs: `source TAB target`, or JSONL where the name ends so.", rich_help_panel=OUTPUT)
    ],
    forward: Annotated[
        bool,
        typer.Option(
            "--forward", help="The run goes from source to target: self-training, sequence-level distillation."
        ),
    ] = False,
    sample: Sample = False,
    beam: Beam = None,
    settings: Settings = None,
    tag: Annotated[str, typer.Option(help="Word before every synthetic source, such as `<BT>`.")] = "",
    max_ratio: Annotated[float, typer.Option(min=1, help="Largest ratio of the lengths in characters.")] = 5.0,
    mix: Annotated[Path | None, typer.Option(metavar="PAIRS", help="TSV of real pairs to write too.")] = None,
    upsample: Annotated[int, typer.Option(min=1, help="Copies of the real pairs.")] = 1,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Make training pairs of monolingual text: by default back-translation with a run from target to source.

    Empty and truncated outputs, copies, duplicates and pairs beyond the length ratio are left out and counted. The
    same command continues after an interruption.

    Examples:

        transduce backtranslate runs/en-de english.txt --output synthetic.tsv --sample --tag "<BT>"

        transduce backtranslate runs/en-de english.txt --output all.tsv --mix pairs.tsv --upsample 2

        transduce backtranslate runs/de-en german.txt --output distilled.tsv --forward --beam 5
    """
    from rich.console import Console

    from transduce.transfer.synthetic_pairs import PairOptions, write_synthetic_pairs

    model = load_ensemble(run, device, trust_user_code, None, None)
    chosen = generation_settings(settings, beam=beam, strategy="sample" if sample else None)
    model.settings(**chosen)  # reports a wrong name or value before any input is read
    options = PairOptions(forward, tag, max_ratio, "" if mix is None else str(mix), upsample)
    counts = write_synthetic_pairs(model, text, output, options, Console(stderr=True), **chosen)
    for what, count in counts.items():
        print(f"{what}: {count:,}", file=sys.stderr)
