"""A run and lines in, vectors and what lies close out: embed, search, cluster, similarity."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.options import (
    Device,
    Documents,
    Lines,
    Output,
    OwnParts,
    RunArgument,
    open_console,
    open_run,
    written_to,
)
from transduce.errors import InputError


def embed(
    run: RunArgument,
    file: Lines = "-",
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
    from transduce.data.readers.corpus import read_lines
    from transduce.retrieval.embeddings import embed_lines, write_npy

    if output is None and not tsv:
        raise InputError("a .npy needs a file", where="--output", remedy="give --output vectors.npy, or --tsv")
    blocks = embed_lines(open_run(run, device, own_parts), read_lines(file))
    if not tsv and output is not None:
        rows, width = write_npy(blocks, output)
        print(f"{rows:,} vectors of {width} numbers in {output}", file=sys.stderr)
        return
    with written_to(output, file) as stream:
        for block in blocks:
            for row in block:
                stream.write("\t".join(f"{number:.7g}" for number in row) + "\n")


def search(
    run: RunArgument,
    documents: Documents,
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
    from transduce.cli.display import hits_as_json, show_hits
    from transduce.data.readers.corpus import read_lines
    from transduce.retrieval.embeddings import cached_embeddings
    from transduce.retrieval.search import nearest_neighbours

    if (query is None) == (queries is None):
        raise InputError("what to look for?", remedy='give "a query", or --queries FILE')
    model = open_run(run, device, own_parts)
    lines = list(read_lines(documents))
    vectors, console = cached_embeddings(model, lines), open_console()
    asked = [query] if query is not None else list(read_lines(queries or "-"))
    for one, hits in zip(asked, nearest_neighbours(model.embed(asked), vectors, top), strict=True):
        if json:
            print(hits_as_json(one, hits, lines))
        else:
            show_hits(one, hits, lines, console)


def cluster(
    run: RunArgument,
    documents: Documents,
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
    from transduce.cli.display import show_clusters
    from transduce.data.readers.corpus import read_lines
    from transduce.evaluation.retrieval_metrics import unit
    from transduce.retrieval.clustering import draw_map, k_means
    from transduce.retrieval.embeddings import cached_embeddings

    lines = list(read_lines(documents))
    vectors = unit(cached_embeddings(open_run(run, device, own_parts), lines))
    found = k_means(vectors, clusters, seed)
    show_clusters(vectors, lines, found, open_console())
    if output is not None:
        with open(output, "w", encoding="utf-8", newline="\n") as stream:
            stream.writelines(f"{label + 1}\t{line}\n" for label, line in zip(found.labels, lines, strict=True))
    if picture is not None:
        draw_map(vectors, lines, found, picture)


def similarity(
    run: RunArgument,
    pairs: Annotated[str, typer.Argument(help="Sentence TAB sentence, and TAB gold similarity where it is known.")],
    output: Output = None,
    device: Device = "auto",
    own_parts: OwnParts = False,
) -> None:
    """The cosine of the two sentences of each line; with gold similarities, how well the two orders agree.

    Example:

        transduce similarity runs/paraphrases sts.tsv
    """
    from transduce.evaluation.evaluate import interval
    from transduce.evaluation.retrieval_metrics import Spearman
    from transduce.retrieval.search import pair_similarities

    found = list(pair_similarities(open_run(run, device, own_parts), pairs))
    with written_to(output, pairs) as stream:
        for one in found:
            stream.write(f"{one.cosine:.6f}\n")
    golds = [one.gold for one in found if one.gold is not None]
    if golds:
        metric = Spearman()
        range_ = interval(metric, metric.statistics([one.cosine for one in found], golds), 1000, seed=1)
        told = f"Spearman {range_.value:.2f} (95 % interval {range_.low:.2f} to {range_.high:.2f})"
        print(f"{len(golds):,} pairs, {told}", file=sys.stderr)
