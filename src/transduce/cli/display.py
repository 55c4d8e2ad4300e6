"""Results for people: tables, attention maps, suggested commands; and their JSON forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.autoconfig import Plan
from transduce.errors import InputError
from transduce.evaluation.calibration import QUALITIES, CalibrationReport
from transduce.evaluation.evaluate import Evaluation
from transduce.evaluation.robustness import Probe
from transduce.explain import html, png, terminal
from transduce.explain.attention import READ_AT, AttentionMap, Explanation, to_words
from transduce.inference import Prediction
from transduce.inference.retrieval import Clustering, Hit, distinctive_words
from transduce.recipe import Recipe, TrainingRecipe
from transduce.recipe.compatibility import gives_vectors
from transduce.storage import json_line
from transduce.training.ensemble_run import EnsembleResult, sharing_time
from transduce.training.experiment import TrainingResult
from transduce.training.report import duration

MIN_LINES = 20  # with fewer, an interval says nothing


def show_recipe(recipe: Recipe, console: Console) -> None:
    """Prints the keys of a recipe that differ from the defaults."""
    console.print("the recipe:", highlight=False)
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    console.print(escape(text.rstrip()), style="dim", highlight=False, soft_wrap=True)


def show_plan(plan: Plan, seconds: float | None, console: Console) -> None:
    """Prints what was seen, each value that was chosen with its reason, the expected time, and the recipe."""
    seen, recipe = plan.statistics, plan.recipe
    if plan.ensemble is not None:  # as each model is trained
        recipe = sharing_time(recipe, plan.ensemble.members)
    console.print(f"{seen.pairs:,} pairs", highlight=False)
    for name, side in (("source", seen.source), ("target", seen.target)):
        text = f"{name}: {side.characters:g} characters and {side.words:g} words a line (median), "
        text += f"{len(side.alphabet):,} different characters, {side.vocabulary:,} different words"
        console.print(text, highlight=False)
    minutes = plan.recipe.training.minutes
    limit = None if minutes is None else f"{minutes:g} minutes of training"
    time = limit or "no limit of time (--minutes gives one)"
    console.print(f"device: {plan.budget.device}; {time}\n", highlight=False)
    content = plan.recipe.model_dump(mode="json")
    for key, reason in plan.reasons.items():
        value: Any = content
        for name in key.split("."):
            value = value[name]
        shown = yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]
        console.print(f"{key}: {shown}\n    {reason}", highlight=False, markup=False, soft_wrap=True)
    if plan.ensemble is not None:
        console.print(
            f"ensemble: {plan.ensemble.members}\n    {plan.ensemble.reason}; they share the time", highlight=False
        )
    if seconds is not None:
        one = "" if plan.ensemble is None else "for each model: "
        console.print(f"\n{one}{_expected_time(seconds, recipe.training)}", highlight=False)
    console.print()
    show_recipe(recipe, console)


def _expected_time(seconds: float, training: TrainingRecipe) -> str:
    """The time of all updates that are allowed, from that of one."""
    most = seconds * training.steps
    text = f"an update takes about {1000 * seconds:.0f} ms on this machine: {training.steps:,} take {duration(most)}, "
    if training.minutes is not None and 60 * training.minutes < most:
        text += f"and the time allows about {60 * training.minutes / seconds:,.0f} of them, "
    return text + "validations not counted; training may end sooner"


def show_scores(scores: dict[str, Evaluation], console: Console) -> None:
    """Prints every score of every data set with its confidence interval."""
    table = Table("set", "lines", "metric", "score", "95 % interval", box=None, header_style="bold", pad_edge=False)
    for name, evaluation in scores.items():
        for metric, score in evaluation.scores.items():
            interval = f"{score.low:.2f} to {score.high:.2f}" if evaluation.count >= MIN_LINES else "too few lines"
            table.add_row(escape(name), f"{evaluation.count:,}", metric, f"{score.value:.2f}", interval)
    console.print(table)


def show_calibration(report: CalibrationReport, console: Console) -> None:
    """Prints the calibration error before and after calibration, and the reliability of the calibrated confidence."""
    errors = f"expected calibration error {report.ece_before:.3f} before calibration, {report.ece_after:.3f} after"
    console.print(f"confidence is {QUALITIES[report.quality]}: {errors}", highlight=False)
    table = Table("confidence", "lines", "mean", report.quality, "", box=None, header_style="bold", pad_edge=False)
    for one in report.after:
        limits = f"{one.low:.1f} to {one.high:.1f}"
        row = (limits, f"{one.count:,}", f"{one.confidence:.2f}", f"{one.quality:.2f}", "█" * round(24 * one.quality))
        table.add_row(*row)
    console.print(table)


def show_warnings(counts: Mapping[str, int], total: int, console: Console) -> None:
    """Prints the number of outputs with each kind of warning."""
    kinds = [f"{kind.replace('_', ' ')} {count:,}" for kind, count in counts.items() if kind != "lines"]
    detail = f": {', '.join(kinds)}" if kinds else ""
    console.print(f"outputs with warnings: {counts['lines']:,} of {total:,}{detail}", highlight=False)


def show_probes(probes: Sequence[Probe], console: Console) -> None:
    """Prints the effect of each perturbation, and some outputs that it changed."""
    columns = ("perturbation", "sources changed", "outputs changed", "metric", "clean", "perturbed", "p")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for one in probes:
        shares = one.name, f"{one.changed_sources:.1f} %", f"{one.changed_outputs:.1f} %"
        if not one.scores:
            table.add_row(*shares)
        for metric, score in one.scores.items():
            table.add_row(*shares, metric, f"{score.clean:.2f}", f"{score.perturbed:.2f}", f"{score.p_value:.3f}")
    console.print(table)
    for one in probes:
        for source, output, other_source, other_output in one.examples[:1]:
            text = f"{one.name}: {source} -> {output}\n{' ' * len(one.name)}  {other_source} -> {other_output}"
            console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def show_scores_by_length(evaluation: Evaluation, console: Console) -> None:
    """Prints the scores of each bucket of source lengths, with a bar."""
    for metric, buckets in evaluation.by_length.items():
        table = Table("source tokens", "lines", metric, "", box=None, header_style="bold", pad_edge=False)
        scale = max(abs(bucket.interval.value) for bucket in buckets) or 1.0
        for bucket in buckets:
            bar = "█" * round(24 * abs(bucket.interval.value) / scale)
            table.add_row(f"{bucket.low} to {bucket.high}", f"{bucket.count:,}", f"{bucket.interval.value:.2f}", bar)
        console.print(table)


def show_examples(examples: Sequence[tuple[str, str, str]], console: Console) -> None:
    """Prints (source, output, reference) triples."""
    table = Table("", "source", "output", "reference", box=None, header_style="bold", pad_edge=False)
    for source, output, reference in examples:
        mark = "[green]✓[/]" if output == reference else "[red]✗[/]"
        table.add_row(mark, escape(source), escape(output), escape(reference))
    console.print(table)


_STOP_REASONS = {
    "steps": "all updates done",
    "minutes": "time limit reached",
    "patience": "no more improvement on the development set",
    "perfect": "a perfect score on the development set",
    "interrupted": "interrupted",
}


def show_trained(trained: TrainingResult, console: Console) -> None:
    """Prints the end of a training run: stop reason, scores, examples, suggested commands."""
    folder, outcome = trained.run.folder, trained.outcome
    best = "" if outcome.best_step is None else f", best at {outcome.best_step:,}"
    console.print(f"\n{_STOP_REASONS[outcome.reason]} after update {outcome.step:,}{best}", highlight=False)
    if outcome.reason == "interrupted":
        console.print(
            f"continue with the same command and --resume; checkpoints in {folder}", highlight=False, markup=False
        )
        return
    show_scores(trained.scores, console)
    if trained.examples:
        console.print()
        show_examples([(_relative(source), output, wanted) for source, output, wanted in trained.examples], console)
    console.print(f"\nthe run is in {folder}:", highlight=False, markup=False, soft_wrap=True)
    console.print("recipe.yaml, log.jsonl, metrics.json, curves.png, checkpoints/\nnext:", highlight=False)
    for command in _suggested_commands(trained):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def show_ensemble(trained: EnsembleResult, console: Console) -> None:
    """Prints the development scores of each member and of the ensemble, then its scores on all data sets."""
    folder = quote(str(trained.run.folder))
    if trained.model is None:
        console.print(
            f"\ninterrupted; finished trainings: {len(trained.members)}. Continue with the same command and --resume",
            highlight=False,
        )
        return
    metrics = list(trained.scores["dev"].scores)
    table = Table("development", *metrics, box=None, header_style="bold", pad_edge=False)
    for name, scores in trained.members.items():
        table.add_row(
            name, *(f"{scores[metric]:.2f}" for metric in metrics), style="bold" if name == "ensemble" else ""
        )
    console.print()
    console.print(table)
    chosen = trained.run.members()
    found = f"an ensemble of {len(chosen)}"
    if len(chosen) == 1:
        name = chosen[0].name
        one = f"member {name}" if name.isdigit() else f"the {name} recipe"
        found = f"{one} alone, which is better on the development set than the ensemble"
    console.print(f"\nthe run is {found}:", highlight=False, markup=False)
    show_scores(trained.scores, console)
    console.print("\nnext:", highlight=False)
    for command in (f"transduce generate {folder} input.txt", f"transduce distil {folder}"):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _suggested_commands(trained: TrainingResult) -> list[str]:
    """Commands to paste. Everything is quoted for the shell, so that no text of the data can run as code."""
    run = quote(str(trained.run.folder))
    if gives_vectors(trained.model.recipe.model):
        return [
            f'transduce search {run} documents.txt "a query"',
            f"transduce cluster {run} documents.txt --png map.png",
            f"transduce embed {run} lines.txt --output vectors.npy",
        ]
    source = _relative(trained.examples[0][0]) if trained.examples else "..."
    line = _shell_quote(source)
    is_file = bool(
        trained.model.source_encoding.sources_in(source)
    )  # the source itself is a file, not a line of a file
    return [
        f"transduce generate {run} {line}" if is_file else f"echo {line} | transduce generate {run}",
        f"transduce explain {run} {line} --html attention.html",
        f"transduce evaluate {run}",
    ]


def _relative(source: str) -> str:
    """File names of a source, relative to the working directory where they are below it."""
    here = f"{Path.cwd()}/"
    return "\t".join(part.removeprefix(here) for part in source.split("\t"))


def _shell_quote(line: str) -> str:
    """Quotes a line for the shell. A tab is written as \\t, because terminals show it as blanks."""
    if "\t" not in line:
        return quote(line)
    escaped = line.replace("\\", "\\\\").replace("'", "\\'").replace("\t", "\\t")
    return f"$'{escaped}'"


def attention_map(explained: Explanation, level: str, layer: Any, head: Any) -> AttentionMap:
    """The attention map between tokens or words; `auto` means words if both sides have several."""
    return at_level(explained.map(layer, head), level)


def show_attributions(explained: Explanation, level: str, console: Console) -> None:
    """Prints the map of each attribution method, with its measures and what they say."""
    for name, measured in explained.faithfulness.items():
        if explained.attention is not None:  # an encoder with a head has its attribution in the map above
            console.print(f"\n[bold]{name}[/]", highlight=False)
            terminal.draw(at_level(explained.attribution_map(name), level), console)
        parts = [
            f"comprehensiveness {measured.comprehensiveness:.2f} (random {measured.random_comprehensiveness:.2f})",
            f"sufficiency {measured.sufficiency:.2f} (random {measured.random_sufficiency:.2f})",
        ]
        if measured.completeness_error is not None:
            parts.append(f"completeness error {measured.completeness_error:.3f}")
        if measured.randomisation is not None:
            parts.append(f"rank correlation with shuffled weights {measured.randomisation:.2f}")
        if measured.seed_variance is not None:
            parts.append(f"divergence of the seeds {measured.seed_variance:.3f} bits")
        console.print(f"[dim]{name}: {'; '.join(parts)}[/]", highlight=False)
        console.print(measured.verdict, highlight=False)
    if explained.uniform_swap is not None:
        console.print(f"\n{explained.uniform_swap.verdict}", highlight=False)


def at_level(tokens: AttentionMap, level: str) -> AttentionMap:
    """A map between tokens as one between words, where the level asks for it."""
    several = min(len(tokens.source_labels), len(tokens.target_labels)) > 1
    if level not in ("auto", "word", "token"):
        raise InputError(f"unknown level {level!r}", where="--level", remedy="auto, word or token")
    return to_words(tokens, keep_end=True) if level == "word" or (level == "auto" and several) else tokens


def show_explained(
    explained: Explanation, attention: AttentionMap | None, console: Console, *, sourceless: bool = False
) -> None:
    """Prints source, output, score and attention map."""
    if explained.attention is None and attention is not None:
        note = (
            "rows of the output: attribution (integrated gradients); rows of the source: self-attention of the encoder"
        )
        console.print(f"[dim]{note}[/]", highlight=False)
    console.print(f"[dim]{'prompt' if sourceless else 'source'}[/]  {escape(explained.source)}", highlight=False)
    console.print(f"[dim]output[/]  {escape(explained.output)}   [dim]score {explained.score:.3f}[/]", highlight=False)
    if attention is None and sourceless:
        console.print("this language model has no self-attention to show")
    elif attention is None and "head" in explained.model_info:
        console.print("this model has neither attention nor gradients to show")
    elif attention is None:
        console.print("this decoder does not attend to the source: it gets one fixed vector")
    elif explained.visual_sources and 3 * len(attention.source_tokens) > console.width:
        terminal.draw_strongest(attention, console)  # too many columns for a table
    else:
        terminal.draw(attention, console)
    if explained.attention is not None and not sourceless:
        console.print(f"[dim]attention is read {READ_AT[explained.read_at]}[/]", highlight=False)


def save_pictures(
    explained: Sequence[Explanation],
    maps: Sequence[AttentionMap],
    html_path: Path | None,
    png_path: Path | None,
    run: Path,
) -> None:
    """Writes an HTML page with all explanations, under the name of the run, and a PNG with the first."""
    if html_path is not None:
        html.write_page(explained, html_path, f"{run.resolve().name}: attention")
    if png_path is not None and maps:
        titles = {"title": explained[0].output, "subtitle": explained[0].source}
        if explained[0].visual_sources:
            png.draw_overlay(explained[0].visual_sources, maps[0], png_path, **titles)
        else:
            png.draw_map(maps[0], png_path, **titles)


def prediction_json(prediction: Prediction, *, warnings: bool = True) -> str:
    """One prediction as one line of JSON."""
    content: dict[str, Any] = {
        "source": prediction.source,
        "text": prediction.text,
        "tokens": prediction.tokens,
        "score": prediction.score,
        "token_scores": prediction.token_scores,
        "confidence": prediction.confidence,
        "complete": prediction.complete,
        "source_cut": prediction.source_cut,
        "parts": [{"source": one.source, "text": one.text} for one in prediction.parts],
        "nbest": [
            {
                "text": one.text,
                "tokens": one.tokens,
                "score": one.score,
                "token_scores": one.token_scores,
                "confidence": one.confidence,
            }
            for one in prediction.nbest
        ],
        "alignment": prediction.alignment,
    }
    if warnings:
        content["warnings"] = [one.to_json() for one in prediction.warnings]
    if prediction.segments:
        content["segments"] = [vars(one) for one in prediction.segments]
    return json_line(content)


def show_hits(query: str, hits: Sequence[Hit], documents: Sequence[str], console: Console) -> None:
    """The search results of one query."""
    console.print(f"[bold]{escape(query)}[/]", highlight=False, soft_wrap=True)
    table = Table("cosine", "line", "text", box=None, header_style="dim", pad_edge=False)
    for hit in hits:
        table.add_row(f"{hit.cosine:.3f}", f"{hit.row + 1:,}", escape(documents[hit.row]))
    console.print(table)


def hits_json(query: str, hits: Sequence[Hit], documents: Sequence[str]) -> str:
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
