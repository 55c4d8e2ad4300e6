"""A run and pairs in, how good it is out: evaluate, score."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import (
    Beam,
    Device,
    Output,
    OwnParts,
    RunArgument,
    Settings,
    open_console,
    open_run,
    read_settings,
    written_to,
)
from transduce.errors import InputError


def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Argument(help="Pairs; by default the run's test set, else its held-out pairs.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="A second run: a paired test on the same lines.")] = None,
    beam: Beam = None,
    settings: Settings = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Score a model on pairs, with 95 % intervals and quality by source length.

    Examples:

        transduce evaluate runs/demo

        transduce evaluate runs/demo test.tsv --json scores.json

        transduce evaluate runs/a test.tsv --against runs/b
    """
    import json as json_format

    from transduce.cli.display import show_lengths, show_scores
    from transduce.evaluation.scoring import answer, compare_outputs, held_out, score_outputs

    console = open_console()
    model = open_run(run, device, own_parts)
    chosen = read_settings(settings, beam=beam)
    model.settings(**chosen)
    if against is not None and against.resolve() == run.resolve():
        raise InputError("the same run twice", where="--against", remedy="name another run")
    name, lines = held_out(model, data)
    outputs = answer(model, lines, model.recipe.evaluation.metrics, **chosen)
    scores = score_outputs(model, lines, outputs)
    show_scores({name: scores}, console)
    show_lengths(scores, console)
    for score in scores.scores.values():
        console.print(f"[dim]{score.signature}[/]", highlight=False)
    content = {"set": name, **scores.to_json()}
    if against is not None:
        rival = open_run(against, device, own_parts)
        rivals = answer(rival, lines, model.recipe.evaluation.metrics, **chosen)
        verdicts = compare_outputs(model, lines, {str(run): outputs, str(against): rivals})
        for metric, verdict in verdicts.items():
            console.print(f"{metric}: {verdict}", highlight=False)
        content["against"] = {
            "run": str(against),
            "verdicts": verdicts,
            **score_outputs(model, lines, rivals).to_json(),
        }
    if json is not None:
        json.write_text(json_format.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def score(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(help="Pairs whose targets are scored; for a language model, text.")],
    output: Output = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, token by token.")] = False,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """The log-probability and perplexity of given pairs: `score TAB perplexity`, one line a pair.

    A language model scores text: one line a line, or one for the whole file where it was trained on running text.

    Examples:

        transduce score runs/demo pairs.tsv

        transduce score runs/book book.txt
    """
    from transduce.evaluation.scoring import perplexities, score_lines

    model, found = open_run(run, device, own_parts), []
    with written_to(output, pairs) as stream:
        for one in score_lines(model, pairs, as_json=json):
            stream.write(one.written + "\n")
            found.append(one.scored)
    told = ", ".join(f"{value:.4g} a {unit}" for unit, value in perplexities(found).items())
    what = "texts" if model.running else "lines" if model.sourceless else "pairs"
    print(f"{len(found):,} {what}, perplexity {told}", file=sys.stderr)
