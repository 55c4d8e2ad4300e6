"""Results in, tables and pictures for people out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation
from transduce.evaluation.scoring import json_line
from transduce.explain import html as page
from transduce.explain import overlay, terminal
from transduce.explain import png as picture
from transduce.explain.alignment import AttentionMap, to_words
from transduce.explain.html import Explained
from transduce.inference import Prediction
from transduce.recipe import Recipe
from transduce.recipe.compatibility import gives_vectors
from transduce.retrieval.clustering import Clustering, distinctive_words
from transduce.retrieval.search import Hit
from transduce.training.experiment import TrainingResult


def show_recipe(recipe: Recipe, console: Console) -> None:
    """What a recipe says beyond the defaults."""
    console.print("the recipe:", highlight=False)
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    console.print(escape(text.rstrip()), style="dim", highlight=False, soft_wrap=True)


def show_scores(scores: dict[str, Evaluation], console: Console) -> None:
    table = Table("set", "lines", "metric", "score", "95 % interval", box=None, header_style="bold", pad_edge=False)
    for name, evaluation in scores.items():
        for metric, score in evaluation.scores.items():
            between = f"{score.low:.2f} to {score.high:.2f}"
            table.add_row(escape(name), f"{evaluation.count:,}", metric, f"{score.value:.2f}", between)
    console.print(table)


def show_lengths(evaluation: Evaluation, console: Console) -> None:
    for metric, buckets in evaluation.by_length.items():
        table = Table("source tokens", "lines", metric, "", box=None, header_style="bold", pad_edge=False)
        scale = max(abs(bucket.interval.value) for bucket in buckets) or 1.0
        for bucket in buckets:
            bar = "█" * round(24 * abs(bucket.interval.value) / scale)
            table.add_row(f"{bucket.low} to {bucket.high}", f"{bucket.count:,}", f"{bucket.interval.value:.2f}", bar)
        console.print(table)


def show_examples(examples: Sequence[tuple[str, str, str]], console: Console) -> None:
    table = Table("", "source", "output", "reference", box=None, header_style="bold", pad_edge=False)
    for source, output, reference in examples:
        mark = "[green]✓[/]" if output == reference else "[red]✗[/]"
        table.add_row(mark, escape(source), escape(output), escape(reference))
    console.print(table)


def show_trained(trained: TrainingResult, console: Console) -> None:
    """The end of a training run: how it went, how good it is, what to try next."""
    folder, outcome = trained.run.folder, trained.outcome
    reasons = {
        "steps": "all updates done",
        "minutes": "time is up",
        "patience": "no more progress on the held-out pairs",
        "interrupted": "interrupted",
    }
    best = "" if outcome.best_step is None else f", best at {outcome.best_step:,}"
    console.print(f"\n{reasons[outcome.reason]} after update {outcome.step:,}{best}", highlight=False)
    if outcome.reason == "interrupted":
        console.print(
            f"go on with the same command and --resume; checkpoints in {folder}", highlight=False, markup=False
        )
        return
    show_scores(trained.scores, console)
    if trained.examples:
        console.print()
        show_examples([(_near(source), output, wanted) for source, output, wanted in trained.examples], console)
    console.print(f"\neverything is in {folder}:", highlight=False, markup=False, soft_wrap=True)
    console.print("recipe.yaml, log.jsonl, metrics.json, curves.png, checkpoints/\nnext:", highlight=False)
    # Quoted for the shell: what stands in the data must not run when a line is pasted.
    first = _near(trained.examples[0][0]) if trained.examples else "..."
    place, line = quote(str(folder)), _quoted(first)
    itself = bool(trained.model.reading.found(first))  # a file that is a source, not one that holds lines
    commands = [
        f"transduce generate {place} {line}" if itself else f"echo {line} | transduce generate {place}",
        f"transduce explain {place} {line} --html attention.html",
        f"transduce evaluate {place}",
    ]
    if gives_vectors(trained.model.recipe.model):
        commands = [
            f'transduce search {place} documents.txt "a query"',
            f"transduce cluster {place} documents.txt --picture map.png",
            f"transduce embed {place} lines.txt --output vectors.npy",
        ]
    for command in commands:
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _near(source: str) -> str:
    """What names a file below this folder, named from here: the end of a long path is what tells it apart."""
    here = f"{Path.cwd()}/"
    return "\t".join(part.removeprefix(here) for part in source.split("\t"))


def _quoted(line: str) -> str:
    """For the shell; a tab is written out, for consoles show it as blanks."""
    if "\t" not in line:
        return quote(line)
    told = line.replace("\\", "\\\\").replace("'", "\\'").replace("\t", "\\t")
    return f"$'{told}'"


def at_level(explained: Explained, level: str, layer: Any, head: Any) -> AttentionMap:
    """A map of tokens or of words; `auto` takes words where both sides have several."""
    tokens = explained.map(layer, head)
    several = min(len(tokens.source_labels), len(tokens.target_labels)) > 1
    if level not in ("auto", "word", "token"):
        raise InputError(f"there is no level {level!r}", where="--level", remedy="auto, word or token")
    return to_words(tokens, keep_end=True) if level == "word" or (level == "auto" and several) else tokens


def show_explained(
    explained: Explained, attention: AttentionMap | None, console: Console, *, sourceless: bool = False
) -> None:
    console.print(f"[dim]{'begun ' if sourceless else 'source'}[/]  {escape(explained.source)}", highlight=False)
    console.print(f"[dim]output[/]  {escape(explained.output)}   [dim]score {explained.score:.3f}[/]", highlight=False)
    if attention is None and sourceless:
        console.print("a language model has no source, and this decoder does not attend to its own past")
    elif attention is None:
        console.print("this decoder does not attend to the source: all it knows came through one vector")
    elif explained.scenes and 3 * len(attention.source_tokens) > console.width:
        terminal.draw_peaks(attention, console)  # many cells of a scene make no table
    else:
        terminal.draw(attention, console)


def save_pictures(
    explained: Sequence[Explained], maps: Sequence[AttentionMap], html: Path | None, png: Path | None
) -> None:
    if html is not None:
        page.write(explained, html, "Attention")
    if png is not None and maps:
        head = {"title": explained[0].output, "subtitle": explained[0].source}
        if explained[0].scenes:
            overlay.draw(explained[0].scenes, maps[0], png, **head)
        else:
            picture.draw(maps[0], png, **head)


def as_json(prediction: Prediction) -> str:
    """One line of JSON for one line of input."""
    content: dict[str, Any] = {
        "source": prediction.source,
        "text": prediction.text,
        "tokens": prediction.tokens,
        "score": prediction.score,
        "token_scores": prediction.token_scores,
        "complete": prediction.complete,
        "source_cut": prediction.source_cut,
        "nbest": [
            {"text": one.text, "tokens": one.tokens, "score": one.score, "token_scores": one.token_scores}
            for one in prediction.nbest
        ],
        "alignment": prediction.alignment,
    }
    return json_line(content)


def as_line(text: str) -> str:
    """One line in, one line out: a line break inside an output becomes a space."""
    return text.replace("\r", " ").replace("\n", " ")


def show_hits(query: str, hits: Sequence[Hit], documents: Sequence[str], console: Console) -> None:
    """The search results of one query."""
    console.print(f"[bold]{escape(query)}[/]", highlight=False, soft_wrap=True)
    table = Table("cosine", "line", "text", box=None, header_style="dim", pad_edge=False)
    for hit in hits:
        table.add_row(f"{hit.cosine:.3f}", f"{hit.row + 1:,}", escape(documents[hit.row]))
    console.print(table)


def hits_as_json(query: str, hits: Sequence[Hit], documents: Sequence[str]) -> str:
    """The search results of one query as one line of JSON; `line` counts from 1, as editors do."""
    content = [{"cosine": hit.cosine, "line": hit.row + 1, "text": documents[hit.row]} for hit in hits]
    return json_line({"query": query, "hits": content})


def show_clusters(vectors: np.ndarray, lines: Sequence[str], clustering: Clustering, console: Console) -> None:
    """Each cluster with its size, its distinctive words, and the lines nearest to its centre."""
    for number in range(len(clustering.centres)):
        size = int((clustering.labels == number).sum())
        words = ", ".join(distinctive_words(lines, clustering.labels, number))
        console.print(f"[bold]{number + 1}[/]  {size:,} lines  [cyan]{escape(words)}[/]", highlight=False)
        for row in clustering.nearest_members(vectors, number, count=3):
            console.print(f"   [dim]{escape(lines[row])}[/]", highlight=False, soft_wrap=True)
