"""Commands that use sentence embeddings: embed, search, cluster, similarity."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transduce.cli.options import (
    OUTPUT,
    Device,
    Documents,
    InputFile,
    Output,
    RunArgument,
    TrustUserCode,
    load_model,
    open_console,
    open_output,
    source_windows,
)
from transduce.errors import InputError
from transduce.storage import replace_file

if TYPE_CHECKING:
    from transduce.inference import Model


def embed(
    run: RunArgument,
    file: InputFile = "-",
    output: Annotated[
        Path | None, typer.Option(help="Output file: a float32 .npy with one row per line.", rich_help_panel=OUTPUT)
    ] = None,
    tsv: Annotated[
        bool, typer.Option("--tsv", help="Write tab-separated numbers instead of .npy.", rich_help_panel=OUTPUT)
    ] = False,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Compute one embedding vector per line.

    Any run with an encoder can be used. Runs of `--task embed` are trained to give texts of the same meaning similar
    vectors; for other runs the vector is the mean of the encoder output.

    Examples:

        transduce embed runs/paraphrases lines.txt --output vectors.npy

        echo "the cat sat" | transduce embed runs/paraphrases --tsv

        transduce embed runs/captions photos/ --output vectors.npy
    """
    from transduce.inference.retrieval import embed_windows, write_npy

    if output is None and not tsv:
        raise InputError("a .npy file cannot be printed", where="--output", remedy="give --output FILE, or --tsv")
    model = load_model(run, device, trust_user_code)
    blocks = embed_windows(model, source_windows(model, file))
    if not tsv and output is not None:
        rows, width = write_npy(blocks, output)
        print(f"{rows:,} vectors of {width} numbers in {output}", file=sys.stderr)
        return
    with open_output(output, file) as stream:
        for block in blocks:
            for row in block:
                stream.write("\t".join(f"{number:.7g}" for number in row) + "\n")
            stream.flush()  # the lines of a pipe are answered as they come


def search(
    run: RunArgument,
    documents: Documents,
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="Query text.")] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with one query per line; - reads standard input.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of documents per query.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per query.", rich_help_panel=OUTPUT)] = False,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Find the lines of a file that are most similar in meaning to a query.

    The embeddings of the documents are cached, so that a second search of the same file is fast. Any run with an
    encoder can be used (see `transduce embed`). Where targets have an encoder of their own, documents are sources, such
    as images, and queries are targets.

    Examples:

        transduce search runs/paraphrases documents.txt "someone cooks dinner"

        transduce search runs/paraphrases documents.txt --queries questions.txt --json --top 3

        transduce search runs/photos photos/ "a dog in the snow"
    """
    from transduce.cli.display import hits_json, show_hits
    from transduce.inference.retrieval import cached_embeddings, nearest_neighbours

    if (query is None) == (queries is None):
        raise InputError("exactly one of QUERY and --queries is needed", remedy='give "a query", or --queries FILE')
    model = load_model(run, device, trust_user_code)
    lines = _all_sources(model, str(documents))
    vectors, console = cached_embeddings(model, lines), open_console()
    texts = [query] if query is not None else _all_sources(model, queries or "-")
    for text, hits in zip(texts, nearest_neighbours(model.embed_targets(texts), vectors, top), strict=True):
        if json:
            print(hits_json(text, hits, lines))
        else:
            show_hits(text, hits, lines, console)


def _all_sources(model: Model, file: str) -> list[str]:
    return [source for window in source_windows(model, file) for source in window]


def cluster(
    run: RunArgument,
    documents: Documents,
    clusters: Annotated[int, typer.Option(min=1, help="Number of clusters.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same clusters.")] = 1,
    png: Annotated[
        Path | None, typer.Option(help="Draw a map of all lines to this PNG file.", rich_help_panel=OUTPUT)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write `cluster TAB line` to this file.", rich_help_panel=OUTPUT)
    ] = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Cluster the lines of a file by meaning (k-means), and draw a map of them.

    Any run with an encoder can be used (see `transduce embed`).

    Example:

        transduce cluster runs/paraphrases documents.txt --clusters 6 --png map.png --output clusters.tsv
    """
    from transduce.cli.display import show_clusters
    from transduce.evaluation.retrieval_metrics import normalise_rows
    from transduce.inference.retrieval import cached_embeddings, draw_map, k_means

    model = load_model(run, device, trust_user_code)
    lines = _all_sources(model, str(documents))
    vectors = normalise_rows(cached_embeddings(model, lines))
    clustering = k_means(vectors, clusters, seed)
    show_clusters(vectors, lines, clustering, open_console())
    if output is not None:
        rows = zip(clustering.labels, lines, strict=True)
        replace_file(output, "".join(f"{label + 1}\t{line}\n" for label, line in rows))
    if png is not None:
        draw_map(vectors, lines, clustering, png)


def similarity(
    run: RunArgument,
    pairs: Annotated[
        str, typer.Argument(metavar="PAIRS", help="Sentence TAB sentence, and optionally TAB gold similarity.")
    ],
    output: Output = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Compute the cosine similarity of sentence pairs; with gold similarities also Spearman's rank correlation.

    Example:

        transduce similarity runs/paraphrases sts.tsv
    """
    from transduce.evaluation.retrieval_metrics import Spearman
    from transduce.evaluation.significance import bootstrap_interval
    from transduce.inference.retrieval import pair_similarities

    similarities = list(pair_similarities(load_model(run, device, trust_user_code), pairs))
    with open_output(output, pairs) as stream:
        for one in similarities:
            stream.write(f"{one.cosine:.6f}\n")
    golds = [one.gold for one in similarities if one.gold is not None]
    if golds:
        metric = Spearman()
        statistics = metric.pair_statistics([one.cosine for one in similarities], golds)
        score = bootstrap_interval(metric, statistics, 1000, seed=1)
        summary = f"Spearman {score.value:.2f} (95 % interval {score.low:.2f} to {score.high:.2f})"
        print(f"{len(golds):,} pairs, {summary}", file=sys.stderr)
