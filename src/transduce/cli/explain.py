"""A run and texts in, where it looked out: explain, align."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from transduce.cli.options import (
    Beam,
    Device,
    Head,
    Layer,
    Output,
    OwnParts,
    RunArgument,
    open_console,
    open_run,
    read_choices,
    written_to,
)
from transduce.errors import InputError


def explain(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="One source: a text, or where sources are files a file or a folder.")],
    html: Annotated[Path | None, typer.Option(help="Write a page that opens offline.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    layer: Layer = "mean",
    head: Head = "mean",
    level: Annotated[str, typer.Option(help="auto, word or token")] = "auto",
    beam: Beam = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Show where the model looked: exact attention of the path that won, in the terminal, as PNG, as HTML.

    Example:

        transduce explain runs/demo "3. März 2026" --html attention.html --png attention.png

        transduce explain runs/captions photo.jpg --html attention.html --png attention.png
    """
    from transduce.cli.display import at_level, save_pictures, show_explained

    model = open_run(run, device, own_parts)
    texts = model.reading.found(text) or [text]
    if png is not None and len(texts) > 1:
        raise InputError(f"a picture shows one source, not {len(texts)}", where=text, remedy="--html shows all of them")
    found = [model.explain(one, beam=beam, nbest=beam or model.recipe.generation.beam) for one in texts]
    numbers = read_choices(layer, head)
    maps = [None if one.attention is None else at_level(one, level, *numbers) for one in found]
    for explained, attention in zip(found, maps, strict=True):
        show_explained(explained, attention, open_console(), sourceless=model.sourceless)
    save_pictures(found, [attention for attention in maps if attention is not None], html, png)
    for path in (html, png if maps[0] is not None else None):
        if path is not None:
            open_console().print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)
    if png is not None and maps[0] is None:
        raise InputError("there is no attention to draw", where=str(png), remedy="--html shows the scores all the same")


def align(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(help="Pairs to align.")],
    gold: Annotated[Path | None, typer.Option(help="Links that people made, one line a pair: 0-0 1-2, 1?3.")] = None,
    back: Annotated[Path | None, typer.Option(help="A run from target to source: both are joined.")] = None,
    symmetrise: Annotated[
        str, typer.Option(help="How: intersection, union, grow-diag or grow-diag-final-and.")
    ] = "grow-diag",
    layer: Layer = "mean",
    head: Head = "mean",
    output: Output = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """The links between the words of given pairs, `0-0 1-2`, one line a pair; with --gold also their error rate.

    Examples:

        transduce align runs/demo pairs.tsv

        transduce align runs/de-en pairs.tsv --gold links.txt --back runs/en-de --symmetrise grow-diag
    """
    from typing import get_args

    from transduce.errors import nearest
    from transduce.explain.alignment import Symmetry, pharaoh
    from transduce.inference.align import View, align_both, error_rate, read_gold, read_pairs
    from transduce.inference.align import align as align_pairs

    if symmetrise not in get_args(Symmetry):
        raise InputError(f"--symmetrise {symmetrise}?", remedy=nearest(symmetrise, get_args(Symmetry)))
    wanted = None if gold is None else read_gold(str(gold))  # what cannot be read is told before the work
    model = open_run(run, device, own_parts)
    other = None if back is None else open_run(back, device, own_parts)
    view = View(*read_choices(layer, head))
    found: list[Any] = []
    with written_to(output, pairs) as stream:
        for chunk in read_pairs(model, pairs):
            if other is None:
                some = align_pairs(model, chunk, view)
            else:
                some = align_both(model, other, chunk, cast(Any, symmetrise), view)
            stream.writelines(pharaoh(one) + "\n" for one in some)
            found += some
    if wanted is not None:
        rate = error_rate(found, wanted, str(gold))
        print(f"alignment error rate {100 * rate:.1f} % of {len(found):,} pairs", file=sys.stderr)
