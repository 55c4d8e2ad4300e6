"""The commands. Each imports what it needs when it runs, so that --help answers at once."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from transduce.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.predict import Model

app = typer.Typer(
    help="Encoder-decoder models: pairs in, a trained, scored, explained model out.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)

RunArgument = Annotated[Path, typer.Argument(help="A run directory, as `transduce train` writes it.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
OwnParts = Annotated[bool, typer.Option("--own-parts", help="Allow parts of your own code (kind: file:Class).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the recipe's generation section, as key=value.")
]


def _console(quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(quiet=quiet)


def _open(run: Path, device: str, own_parts: bool) -> Model:
    from transduce.predict import load

    return load(run, device=device, own_parts=own_parts)


def _read_settings(items: list[str] | None, **given: Any) -> dict[str, Any]:
    from transduce.recipe import override

    return {**override({}, items or []), **{name: value for name, value in given.items() if value is not None}}


@contextmanager
def _written(output: Path | None, read_from: str) -> Iterator[TextIO]:
    """Where lines go: a file, or standard output. A file that is still being read is not overwritten."""
    if output is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        return
    if any(output.exists() and Path(part).exists() and output.samefile(part) for part in read_from.split(",")):
        raise InputError("this file is being read", where=str(output), remedy="write to another file")
    with open(output, "w", encoding="utf-8", newline="\n") as stream:
        yield stream


@app.command()
def train(
    source: Annotated[str, typer.Argument(help="Pairs (TSV, JSONL, Parquet; or SOURCE,TARGET), or a recipe.yaml.")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe.")] = None,
    run: Annotated[
        Path | None,
        # torchrun takes `--run` for its own `--run-path`: under it, write --run-dir.
        typer.Option("--run", "--run-dir", help="Where the run is written; by default runs/NAME."),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="What is learned, without a recipe. From pairs: generate (text to text), classify, tag, entail (two "
            "inputs and a label), embed. From text: lm (a language model), mask (a masked one)."
        ),
    ] = "generate",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Train a model on pairs, with a recipe or without one.

    Examples:

        transduce train pairs.tsv

        transduce train train.en,train.de --run runs/de training.steps=5000

        transduce train recipe.yaml data.train=pairs.tsv --resume

        torchrun --nproc-per-node 2 -m transduce train recipe.yaml --run-dir runs/two
    """
    from transduce.choose import recipe_for
    from transduce.experiment import train as run_training
    from transduce.show import show_recipe, show_trained

    console = _console(quiet)
    name = Path(source.partition(",")[0]).name.partition(".")[0] or "latest"
    recipe = recipe_for(source, settings or [], task)
    if Path(source).suffix not in (".yaml", ".yml") and os.environ.get("RANK", "0") == "0":
        show_recipe(recipe, console)
    trained = run_training(recipe, run or Path("runs") / name, resume=resume, console=console)
    if trained.scores or trained.outcome.reason == "interrupted":  # only the first of several processes has scores
        show_trained(trained, console)
    if trained.outcome.reason == "interrupted":
        raise typer.Exit(128 + (trained.outcome.signal or 2))


@app.command()
def generate(
    run: RunArgument,
    file: Annotated[str, typer.Argument(help="Lines to read; - is standard input.")] = "-",
    output: Annotated[Path | None, typer.Option(help="Where to write; by default standard output.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 is greedy search.")] = None,
    nbest: Annotated[int | None, typer.Option(help="How many hypotheses a line --json gives.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw instead of searching.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line: text, tokens, scores, n-best.")] = False,
    align: Annotated[bool, typer.Option("--align", help="Word links instead of text: 0-0 1-2.")] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="`source TAB output`: lines to train a student on.")] = False,
    prefix: Annotated[str | None, typer.Option(help="Text that every output must begin with.")] = None,
    from_nothing: Annotated[
        int, typer.Option(min=0, help="A language model writes so many texts from <s> on; no input is read.")
    ] = 0,
    settings: Settings = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Write an output for every line of input: one line in, one line out, in order.

    Examples:

        echo "3. März 2026" | transduce generate runs/demo

        transduce generate runs/demo input.txt --output out.txt --beam 5

        transduce generate runs/demo input.txt --json --nbest 3 --set length_penalty=0.6

        transduce generate runs/large input.txt --pairs --output taught.tsv

    A language model takes each line as the beginning of a text, and writes beginning and continuation; an empty line
    begins from nothing. Line feeds inside an output become spaces, but for --json and --from-nothing.

        echo "To be" | transduce generate runs/book --set temperature=0.8

        transduce generate runs/book --from-nothing 3
    """
    from collections import Counter

    from transduce.data.sources import read_lines
    from transduce.distil import pair_line
    from transduce.explain.alignment import pharaoh
    from transduce.predict import in_chunks
    from transduce.show import as_json, as_line

    model = _open(run, device, own_parts)
    chosen = _read_settings(settings, beam=beam, nbest=nbest, strategy="sample" if sample else None)
    model.settings(**chosen)  # a wrong name or value is told before anything is read
    counts: Counter[str] = Counter()
    if pairs and (json or align or from_nothing or model.sourceless):
        raise InputError("--pairs writes sources and outputs, and nothing else", remedy="leave out one of the two")
    inputs, number = max((corpus.inputs for corpus in model.recipe.data.train), default=1), 0
    if from_nothing and not model.sourceless:
        raise InputError("this model needs a source", where="--from-nothing", remedy="give lines to read")
    lines = iter([""] * from_nothing) if from_nothing else read_lines(file)
    with _written(output, "" if from_nothing else file) as stream:
        for chunk in in_chunks(lines):
            begun = None if prefix is None else [prefix] * len(chunk)
            found = model.generate(chunk, prefixes=begun, **chosen)
            if json or align:
                model.reread(found)  # all at once, where asking one by one would be slow
            for one in found:
                counts["empty lines"] += not one.tokens
                counts["sources cut to `max_source`"] += one.source_cut
                counts["outputs cut at the greatest length"] += not one.complete
                counts["lines without attention, so without links"] += (
                    align and bool(one.tokens) and one.attention is None
                )
                text = one.text if from_nothing else as_line(one.text)
                written = as_json(one) if json else pharaoh(one.alignment) if align else text
                number += 1
                if pairs:
                    written = pair_line(one.source, text, inputs, f"{file}:{number}")
                stream.write(written + "\n")
            stream.flush()
    for what, count in counts.items():
        if count:
            print(f"{what}: {count:,}", file=sys.stderr)


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Argument(help="Pairs; by default the run's test set, else its held-out pairs.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
    against: Annotated[Path | None, typer.Option(help="A second run: a paired test on the same lines.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 is greedy search.")] = None,
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

    from transduce.score import answer, compare_outputs, held_out, score_outputs
    from transduce.show import show_lengths, show_scores

    console = _console()
    model = _open(run, device, own_parts)
    chosen = _read_settings(settings, beam=beam)
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
        rival = _open(against, device, own_parts)
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


@app.command()
def score(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(help="Pairs whose targets are scored; for a language model, text.")],
    output: Annotated[Path | None, typer.Option(help="Where to write; by default standard output.")] = None,
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
    from transduce.score import perplexities, score_lines

    model, found = _open(run, device, own_parts), []
    with _written(output, pairs) as stream:
        for one in score_lines(model, pairs, as_json=json):
            stream.write(one.written + "\n")
            found.append(one.scored)
    told = ", ".join(f"{value:.4g} a {unit}" for unit, value in perplexities(found).items())
    what = "texts" if model.running else "lines" if model.sourceless else "pairs"
    print(f"{len(found):,} {what}, perplexity {told}", file=sys.stderr)


@app.command()
def explain(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="One source text.")],
    html: Annotated[Path | None, typer.Option(help="Write a page that opens offline.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    layer: Annotated[str, typer.Option(help="mean, last or a number")] = "mean",
    head: Annotated[str, typer.Option(help="mean or a number")] = "mean",
    level: Annotated[str, typer.Option(help="auto, word or token")] = "auto",
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 is greedy search.")] = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Show where the model looked: exact attention of the path that won, in the terminal, as PNG, as HTML.

    Example:

        transduce explain runs/demo "3. März 2026" --html attention.html --png attention.png
    """
    from transduce.show import at_level, save_pictures, show_explained

    model = _open(run, device, own_parts)
    explained = model.explain(text, beam=beam, nbest=beam or model.recipe.generation.beam)
    numbers = [int(choice) if choice.lstrip("-").isdigit() else choice for choice in (layer, head)]
    attention = None if explained.attention is None else at_level(explained, level, *numbers)
    show_explained(explained, attention, _console(), sourceless=model.sourceless)
    save_pictures([explained], [] if attention is None else [attention], html, png)
    if png is not None and attention is None:
        raise InputError("there is no attention to draw", where=str(png), remedy="--html shows the scores all the same")


@app.command()
def align(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(help="Pairs to align.")],
    gold: Annotated[Path | None, typer.Option(help="Links that people made, one line a pair: 0-0 1-2, 1?3.")] = None,
    back: Annotated[Path | None, typer.Option(help="A run from target to source: both are joined.")] = None,
    symmetrise: Annotated[
        str, typer.Option(help="How: intersection, union, grow-diag or grow-diag-final-and.")
    ] = "grow-diag",
    layer: Annotated[str, typer.Option(help="mean, last or a number")] = "mean",
    head: Annotated[str, typer.Option(help="mean or a number")] = "mean",
    output: Annotated[Path | None, typer.Option(help="Where to write; by default standard output.")] = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """The links between the words of given pairs, `0-0 1-2`, one line a pair; with --gold also their error rate.

    Examples:

        transduce align runs/demo pairs.tsv

        transduce align runs/de-en pairs.tsv --gold links.txt --back runs/en-de --symmetrise grow-diag
    """
    from typing import get_args

    from transduce.align import View, align_both, error_rate, read_gold, read_pairs
    from transduce.align import align as align_pairs
    from transduce.errors import nearest
    from transduce.explain.alignment import Symmetry, pharaoh

    if symmetrise not in get_args(Symmetry):
        raise InputError(f"--symmetrise {symmetrise}?", remedy=nearest(symmetrise, get_args(Symmetry)))
    wanted = None if gold is None else read_gold(str(gold))  # what cannot be read is told before the work
    model = _open(run, device, own_parts)
    other = None if back is None else _open(back, device, own_parts)
    view = View(*[int(choice) if choice.lstrip("-").isdigit() else choice for choice in (layer, head)])
    found: list[Any] = []
    with _written(output, pairs) as stream:
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


@app.command()
def merge(
    run: RunArgument,
    new: Annotated[Path, typer.Argument(help="Where the plain run is written.")],
    own_parts: OwnParts = False,
) -> None:
    """Write a run trained with adapters as a plain one, which needs its base no longer.

    Example:

        transduce merge runs/adapted runs/merged
    """
    from transduce.transfer import merge as merge_run

    weights = _open(run, "cpu", own_parts).network.state_dict()
    print(merge_run(run, new, weights).folder)


@app.command()
def compare(
    candidates: Annotated[
        list[str], typer.Argument(help="Recipes to train and runs to take; key=value changes recipes.")
    ],
    folder: Annotated[Path, typer.Option(help="Where new runs, table and picture go.")] = Path("runs/compare"),
    data: Annotated[str | None, typer.Option(help="Pairs to score on; by default the recipe's test set.")] = None,
    equal: Annotated[str, typer.Option(help="none, parameters or minutes")] = "none",
    minutes: Annotated[float | None, typer.Option(help="Training time of each, with --equal minutes.")] = None,
) -> None:
    """Train or take several models on the same data: one table, one picture of quality against source length.

    Example:

        transduce compare bottleneck.yaml attention.yaml transformer.yaml data.train=pairs.tsv --equal parameters
    """
    from transduce.comparison import compare as run_comparison
    from transduce.comparison import draw_table

    console = _console()
    names = [item for item in candidates if "=" not in item]
    changes = [item for item in candidates if "=" in item]
    if equal not in ("none", "parameters", "minutes"):
        raise InputError(f"--equal {equal}?", remedy="none, parameters or minutes")
    comparison = run_comparison(
        names, folder=folder, overrides=changes, data=data, equal=cast(Any, equal), minutes=minutes, console=console
    )
    draw_table(comparison, console)
    console.print(f"table, numbers and picture: {folder}/compare.md, compare.json, compare.png", highlight=False)


@app.command()
def models() -> None:
    """What is on the shelves: every part that a recipe can name, one line each.

    Example:

        transduce models
    """
    from rich.markup import escape

    from transduce.build import SHELVES, describe, options
    from transduce.evaluation import METRICS

    console = _console()
    for contract, shelf in SHELVES.items():
        console.print(f"[bold]{contract.__name__.lower()}[/]")
        for kind, part in shelf.items():
            console.print(f"  [cyan]{kind:<12}[/] {escape(describe(part))}", highlight=False, soft_wrap=True)
            if names := ", ".join(options(part)):
                console.print(f"  {'':<12} [dim]{names}[/]", highlight=False, soft_wrap=True)
    console.print("[bold]metric[/]")
    for kind, metric in METRICS.items():
        console.print(f"  [cyan]{kind:<12}[/] {escape(describe(metric))}", highlight=False, soft_wrap=True)


@app.command("explain-shapes")
def explain_shapes(
    source: Annotated[str, typer.Argument(help="A recipe.yaml, a run directory, or a file of pairs.")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Every tensor of a model, by name, shape in letters, size and meaning: one batch, then one generation step.

    Examples:

        transduce explain-shapes recipe.yaml model.decoder.layers=2

        transduce explain-shapes runs/demo --json shapes.json
    """
    from transduce.shapes import draw, save, shapes_of

    rows = shapes_of(source, settings or [])
    draw(rows, _console())
    if json is not None:
        save(rows, json)


@app.command()
def embed(
    run: RunArgument,
    file: Annotated[str, typer.Argument(help="Lines to read; - is standard input.")] = "-",
    output: Annotated[Path | None, typer.Option(help="Where to write: vectors.npy, float32, one row a line.")] = None,
    tsv: Annotated[bool, typer.Option("--tsv", help="Numbers between tabs instead, one line a line.")] = False,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Write a vector for every line: one line in, one row out, in order.

    Any run with an encoder will do: one trained with `--task embed`, where like meanings lie close, or a translation
    model, whose vectors are the mean of what its encoder remembers.

    Examples:

        transduce embed runs/paraphrases lines.txt --output vectors.npy

        echo "the cat sat" | transduce embed runs/paraphrases --tsv
    """
    from transduce.data.sources import read_lines
    from transduce.retrieval.vectors import embed_lines, write_vectors

    if output is None and not tsv:
        raise InputError("a .npy needs a file", where="--output", remedy="give --output vectors.npy, or --tsv")
    blocks = embed_lines(_open(run, device, own_parts), read_lines(file))
    if not tsv and output is not None:
        rows, width = write_vectors(blocks, output)
        print(f"{rows:,} vectors of {width} numbers in {output}", file=sys.stderr)
        return
    with _written(output, file) as stream:
        for block in blocks:
            for row in block:
                stream.write("\t".join(f"{number:.7g}" for number in row) + "\n")


@app.command()
def search(
    run: RunArgument,
    documents: Annotated[Path, typer.Argument(help="A text file: one document a line.")],
    query: Annotated[str | None, typer.Argument(help="What to look for.")] = None,
    queries: Annotated[str | None, typer.Option(help="A file of queries, one a line; - is standard input.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many documents a query.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a query.")] = False,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Find the lines of a file that are closest in meaning to a query.

    The vectors of the documents are kept, so a second search in the same file answers at once. Any run with an
    encoder will do (see `transduce embed`).

    Examples:

        transduce search runs/paraphrases documents.txt "someone cooks dinner"

        transduce search runs/paraphrases documents.txt --queries questions.txt --json --top 3
    """
    from transduce.data.sources import read_lines
    from transduce.retrieval.neighbours import nearest
    from transduce.retrieval.tables import hits_as_json, show_hits
    from transduce.retrieval.vectors import vectors_of

    if (query is None) == (queries is None):
        raise InputError("what to look for?", remedy='give "a query", or --queries FILE')
    model = _open(run, device, own_parts)
    lines = list(read_lines(documents))
    vectors, console = vectors_of(model, lines), _console()
    asked = [query] if query is not None else list(read_lines(queries or "-"))
    for one, hits in zip(asked, nearest(model.embed(asked), vectors, top), strict=True):
        if json:
            print(hits_as_json(one, hits, lines))
        else:
            show_hits(one, hits, lines, console)


@app.command()
def cluster(
    run: RunArgument,
    documents: Annotated[Path, typer.Argument(help="A text file: one document a line.")],
    clusters: Annotated[int, typer.Option(min=1, help="How many groups.")] = 8,
    picture: Annotated[Path | None, typer.Option(help="Draw a map of all lines to this PNG.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write group TAB line to this file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same groups.")] = 1,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """Sort the lines of a file into groups of like meaning, and draw a map of them.

    Any run with an encoder will do (see `transduce embed`).

    Example:

        transduce cluster runs/paraphrases documents.txt --clusters 6 --picture map.png --output clusters.tsv
    """
    from transduce.data.sources import read_lines
    from transduce.evaluation.retrieval import unit
    from transduce.retrieval.clusters import cluster as find_clusters
    from transduce.retrieval.maps import draw_map
    from transduce.retrieval.tables import show_clusters, write_clusters
    from transduce.retrieval.vectors import vectors_of

    lines = list(read_lines(documents))
    vectors = unit(vectors_of(_open(run, device, own_parts), lines))
    found = find_clusters(vectors, clusters, seed)
    show_clusters(vectors, lines, found, _console())
    if output is not None:
        write_clusters(lines, found, output)
    if picture is not None:
        draw_map(vectors, lines, found, picture)


@app.command()
def similarity(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(help="Sentence TAB sentence, and TAB gold similarity where it is known.")],
    output: Annotated[Path | None, typer.Option(help="Where to write; by default standard output.")] = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """The cosine of the two sentences of each line; with gold similarities, how well the two orders agree.

    Example:

        transduce similarity runs/paraphrases sts.tsv
    """
    from transduce.evaluation import interval
    from transduce.evaluation.retrieval import Spearman
    from transduce.retrieval.neighbours import compare_pairs

    found = list(compare_pairs(_open(run, device, own_parts), pairs))
    with _written(output, pairs) as stream:
        for one in found:
            stream.write(f"{one.cosine:.6f}\n")
    golds = [one.gold for one in found if one.gold is not None]
    if golds:
        metric = Spearman()
        range_ = interval(metric, metric.statistics([one.cosine for one in found], golds), 1000, seed=1)
        told = f"Spearman {range_.value:.2f} (95 % interval {range_.low:.2f} to {range_.high:.2f})"
        print(f"{len(golds):,} pairs, {told}", file=sys.stderr)


@app.command()
def demo(
    task: Annotated[
        str, typer.Option(help="dates: written dates in many languages to ISO 8601; pronounce: words to phones")
    ] = "dates",
    run: Annotated[
        Path | None, typer.Option(help="Where the run is written; by default runs/demo or runs/TASK.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Only write the task's pairs into this folder, as TSV.")] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="key=value changes to the recipe.")] = None,
) -> None:
    """Train on an embedded task, score it, explain it: the whole line in a few minutes.

    Examples:

        transduce demo

        transduce demo --task pronounce

        transduce demo --task dates --write data/dates
    """
    from transduce.demo import run_demo, write_pairs

    console = _console()
    if write is not None:
        for path in write_pairs(task, write):
            console.print(str(path), highlight=False)
        return
    run_demo(task, run, settings or [], console)


def main() -> None:
    """Runs a command; what the user can mend is told in words, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text is UTF-8 here, whatever the machine's own habit is
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        app(standalone_mode=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
