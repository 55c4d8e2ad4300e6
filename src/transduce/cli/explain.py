"""Commands that show attention, recipes and architectures: explain, align, models, schema, explain-shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from transduce.cli.options import (
    OUTPUT,
    Beam,
    Device,
    Head,
    Intervene,
    Layer,
    Output,
    Overrides,
    RunArgument,
    TrustUserCode,
    layer_and_head,
    load_model,
    open_console,
    open_output,
)
from transduce.errors import InputError, nearest
from transduce.storage import json_line, replace_file

ReadAtOption = Annotated[
    str,
    typer.Option(help="The step at which the attention of a token is read: output, or input (Chen et al. 2020)."),
]


def check_choice(option: str, chosen: str, known: tuple[str, ...]) -> str:
    """The value of an option, which must be one of these."""
    if chosen not in known:
        raise InputError(f"unknown choice {chosen!r}", where=f"--{option}", remedy=nearest(chosen, known))
    return chosen


def explain(
    run: RunArgument,
    text: Annotated[
        str, typer.Argument(metavar="SOURCE", help="One source: a text; for models of files, a file or a folder.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write an offline HTML page.", rich_help_panel=OUTPUT)] = None,
    png: Annotated[Path | None, typer.Option(help="Write a PNG image.", rich_help_panel=OUTPUT)] = None,
    layer: Layer = "mean",
    head: Head = "mean",
    level: Annotated[str, typer.Option(help="Rows and columns of the attention map: auto, word or token.")] = "auto",
    target: Annotated[
        str | None, typer.Option(help="Explain this output in place of the one that is generated.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Attribution method, once or several times: attention, attention_norm, rollout, posterior, "
            "input_x_gradient, integrated_gradients, occlusion, value_zeroing. Each map comes with measures of its "
            "faithfulness; --png draws that of the first."
        ),
    ] = None,
    intervene: Intervene = None,
    read_at: ReadAtOption = "output",
    seed_run: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="With --method: a run of another seed, to compare maps with; once or more."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write tokens, scores, attributions and measures.", rich_help_panel=OUTPUT)
    ] = None,
    beam: Beam = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Show the attention weights of the best hypothesis, in the terminal, as PNG or as HTML.

    For an encoder with a head (classifier, tagger, ...): how much each source token contributes to the output, and the
    self-attention of the encoder.

    Example:

        transduce explain runs/demo "3. März 2026" --html attention.html --png attention.png

        transduce explain runs/captions photo.jpg --html attention.html --png attention.png

        transduce explain runs/demo "3. März 2026" --method occlusion --method attention_norm

        transduce explain runs/demo "3. März 2026" --intervene mask-head:cross:1.3
    """
    from transduce.cli.display import at_level, attention_map, save_pictures, show_attributions, show_explained

    model = load_model(run, device, trust_user_code)
    texts = model.source_encoding.sources_in(text) or [text]
    if png is not None and len(texts) > 1:
        raise InputError(
            f"a PNG shows one source, and there are {len(texts)}", where=text, remedy="use --html, which shows all"
        )
    search: dict[str, Any] = {"beam": beam, "nbest": beam or model.recipe.generation.beam}
    search = {} if target is not None else search
    search["read_at"] = check_choice("read-at", read_at, ("output", "input"))
    search["interventions"] = intervene or ()
    search["seeds"] = [load_model(one, device, trust_user_code) for one in seed_run or ()]
    explained = [model.explain(one, target, method, **search) for one in texts]
    choice = layer_and_head(layer, head)
    maps = [None if one.rows is None else attention_map(one, level, *choice) for one in explained]
    console = open_console()
    for one, attention in zip(explained, maps, strict=True):
        show_explained(one, attention, console, sourceless=model.sourceless)
        show_attributions(one, level, console)
    if method and method[0] != "attention" and explained[0].attention is not None:
        maps[0] = at_level(explained[0].attribution_map(method[0]), level)
    save_pictures(explained, [attention for attention in maps if attention is not None], html, png, run)
    if json is not None:
        replace_file(json, "".join(json_line(one.to_json()) + "\n" for one in explained))
    for path in (html, png if maps[0] is not None else None, json):
        if path is not None:
            console.print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)
    if png is not None and maps[0] is None:
        raise InputError("this model has no attention to draw", where=str(png), remedy="--html still shows the scores")


def align(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="Pairs to align.")],
    gold: Annotated[
        Path | None, typer.Option(help="Gold alignments, one line per pair: 0-0 1-2, and 1?3 for a possible link.")
    ] = None,
    reverse: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run from target to source, to symmetrise with.")
    ] = None,
    symmetrise: Annotated[
        str, typer.Option(help="With --reverse: intersection, union, grow-diag or grow-diag-final-and.")
    ] = "grow-diag",
    layer: Layer = "mean",
    head: Head = "mean",
    level: Annotated[
        str, typer.Option(help="What is linked: word, or token (characters, for a model of characters).")
    ] = "word",
    read_at: ReadAtOption = "output",
    output: Output = None,
    json: Annotated[Path | None, typer.Option(help="With --gold: JSON file for the error rate.")] = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Write the alignment of given pairs, `0-0 1-2`, one line per pair; with --gold also the error rate.

    Examples:

        transduce align runs/demo pairs.tsv

        transduce align runs/de-en pairs.tsv --gold gold.txt --reverse runs/en-de --symmetrise grow-diag
    """
    from typing import get_args

    from transduce.explain.alignment import (
        AttentionSelection,
        Level,
        Symmetrisation,
        align_file,
        error_rate,
        pharaoh,
        read_gold,
    )
    from transduce.explain.attention import READ_AT

    check_choice("symmetrise", symmetrise, get_args(Symmetrisation))
    check_choice("level", level, get_args(Level))
    check_choice("read-at", read_at, ("output", "input"))
    gold_links = None if gold is None else read_gold(str(gold))  # errors of this file are reported first
    model = load_model(run, device, trust_user_code)
    reverse_model = None if reverse is None else load_model(reverse, device, trust_user_code)
    selected = layer_and_head(layer, head)
    selection = AttentionSelection(selected[0], selected[1], cast(Any, level), cast(Any, read_at))
    alignments: list[Any] = []
    with open_output(output, pairs) as stream:
        for links in align_file(model, pairs, reverse_model, cast(Any, symmetrise), selection):
            stream.writelines(pharaoh(one) + "\n" for one in links)
            alignments += links
    if gold_links is not None:
        rate = error_rate(alignments, gold_links, str(gold))
        step = f"attention read {READ_AT[selection.read_at]}"
        print(f"alignment error rate {100 * rate:.1f} % of {len(alignments):,} pairs; {step}", file=sys.stderr)
        if json is not None:
            record = {"count": len(alignments), "alignment_error_rate": 100 * rate, "read_at": read_at}
            replace_file(json, json_line(record) + "\n")


def models() -> None:
    """List every component that a recipe can name, with its options.

    Example:

        transduce models
    """
    from rich.markup import escape

    from transduce.recipe.registry import REGISTRIES, describe, options, title

    console = open_console()
    for contract, registry in REGISTRIES.items():
        console.print(f"[bold]{title(contract)}[/]")
        for kind, part in registry.items():
            console.print(f"  [cyan]{kind:<12}[/] {escape(describe(part))}", highlight=False, soft_wrap=True)
            if names := ", ".join(options(part)):
                console.print(f"  {'':<12} [dim]{names}[/]", highlight=False, soft_wrap=True)


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page in Markdown instead.")] = False,
) -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them.

    Examples:

        transduce schema > recipe.schema.json

        transduce schema --markdown > recipe-reference.md
    """
    import json

    from transduce.recipe.reference import recipe_reference, recipe_schema

    print(recipe_reference().rstrip() if markdown else json.dumps(recipe_schema(), indent=2))


def explain_shapes(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Recipe, run directory, or file of training pairs.")],
    settings: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Write the table to this JSON file.")] = None,
    trust_user_code: TrustUserCode = False,
) -> None:
    """List every tensor of a model with its name, shape and meaning, for one training batch and one generation step.

    Examples:

        transduce explain-shapes recipe.yaml model.decoder.layers=2

        transduce explain-shapes runs/demo --json shapes.json
    """
    from transduce.explain.tensor_shapes import save_rows, shapes_of, show_rows

    rows = shapes_of(source, settings or [], trust_user_code=trust_user_code)
    show_rows(rows, open_console())
    if json is not None:
        save_rows(rows, json)
