"""Commands that measure quality: evaluate, calibrate, score, probe; published results and claims: reproduce, claims."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transduce.cli.options import (
    Beam,
    Combination,
    Device,
    Language,
    Output,
    Policy,
    RunArgument,
    RunsArgument,
    Settings,
    TrustUserCode,
    WarningsFlag,
    Weights,
    check_language,
    check_policy,
    generation_settings,
    load_ensemble,
    load_model,
    open_console,
    open_output,
)
from transduce.errors import InputError, nearest
from transduce.parsing import parse_yaml
from transduce.storage import replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from transduce.evaluation.claims.claim import Claim
    from transduce.inference import Model

FILES = "Files of outputs"  # panel of --help


def evaluate(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="Run directory, bundle or Hub model; RUN1,RUN2 is an ensemble. Left out with --hypotheses.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Argument(metavar="PAIRS", help="Test pairs. [default: the run's test set, else its development set]"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this JSON file.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A second run: paired significance test on the same lines.")
    ] = None,
    without_context: Annotated[
        bool,
        typer.Option(
            "--without-context",
            help="A model with data.context: also the scores with an empty context, and a paired significance test.",
        ),
    ] = False,
    hypotheses: Annotated[
        list[Path] | None,
        typer.Option(help="Evaluate this file of outputs instead of a run. May be repeated.", rich_help_panel=FILES),
    ] = None,
    references: Annotated[
        list[Path] | None,
        typer.Option(help="File of references, one per line. May be repeated.", rich_help_panel=FILES),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="Metrics of the files, separated by commas: names, or {kind: comet, model: FOLDER}.",
            rich_help_panel=FILES,
        ),
    ] = "bleu,chrf,ter",
    sources: Annotated[
        Path | None,
        typer.Option(help="File of sources, for metrics that read them (comet).", rich_help_panel=FILES),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page with the differences of every line.", rich_help_panel=FILES),
    ] = None,
    reliability: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the reliability diagram of a calibrated run.")
    ] = None,
    wait_k: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Simultaneous translation: wait-k outputs, with latencies.")
    ] = None,
    alignatt: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Simultaneous translation by attention (AlignAtt), with latencies."),
    ] = None,
    to: Language = None,
    beam: Beam = None,
    settings: Settings = None,
    warnings: WarningsFlag = True,
    combination: Combination = None,
    weights: Weights = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Evaluate a model on pairs: scores with 95 % confidence intervals, by language, and by source length.

    A calibrated run also has the expected calibration error of its confidence.

    Examples:

        transduce evaluate runs/demo

        transduce evaluate runs/demo test.tsv --json scores.json

        transduce evaluate runs/a test.tsv --against runs/b

        transduce evaluate runs/documents test.tsv --without-context

        transduce evaluate runs/a,runs/b test.tsv --weights 2,1

        transduce evaluate runs/demo test.tsv --reliability reliability.png

        transduce evaluate runs/de-en test.tsv --wait-k 3

    Files of outputs are evaluated without a model; further ones are compared with the first by paired tests.

        transduce evaluate --hypotheses out.txt --references ref.txt --metrics bleu,chrf++ --report diff.html
    """
    if hypotheses or references:
        if run is not None or not hypotheses or not references:
            raise InputError(
                "--hypotheses and --references belong together, without a run",
                where="evaluate",
                remedy="transduce evaluate --hypotheses out.txt --references ref.txt",
            )
        _evaluate_files((hypotheses, references, sources), metrics, json, report)
        return
    if run is None:
        raise InputError("no run", where="evaluate", remedy="name a run, or give --hypotheses and --references")
    import json as json_format

    from transduce.cli.display import show_scores, show_scores_by_length, show_warnings
    from transduce.evaluation.held_out import (
        empty_contexts,
        evaluate_languages,
        evaluate_output,
        load_held_out,
        predict,
    )

    console = open_console()
    model = load_ensemble(run, device, trust_user_code, combination, weights)
    chosen = generation_settings(settings, beam=beam)
    model.settings(**chosen)  # reports a wrong name or value before any data is read
    if against is not None and against.resolve() == run.resolve():
        raise InputError("this is the same run", where="--against", remedy="name another run")
    check_language(model, to)
    name, lines = load_held_out(model, data, to)
    policy = check_policy(wait_k, alignatt)
    outputs, latencies = _outputs(model, lines, policy, {**chosen, "detect": warnings})
    scores = evaluate_output(model, lines, outputs)
    languages = evaluate_languages(model, lines, outputs)
    show_scores({name: scores, **{f"{name}: {one}": found for one, found in languages.items()}}, console)
    show_scores_by_length(scores, console)
    for metric, score in scores.scores.items():
        if score.signature != metric:  # one that says how the metric was computed
            console.print(score.signature, style="dim", highlight=False, markup=False)
    content: dict[str, Any] = {"set": name, **scores.to_json()}
    if outputs.warnings is not None:
        content["warnings"] = outputs.warnings
        show_warnings(outputs.warnings, len(lines), console)
    for measure, value in latencies.items():
        content.setdefault("latency", dict([policy] if policy else ()))[measure] = value
        console.print(f"{measure.replace('_', ' ')}: {value:.2f}", highlight=False)
    if (found := _calibration(model, name, lines, outputs, reliability, console)) is not None:
        content["calibration"] = found
    if languages:
        content["languages"] = {one: found.to_json() for one, found in languages.items()}
    if against is not None:
        other = load_model(against, device, trust_user_code)
        other_outputs = predict(other, lines, model.recipe.evaluation.metrics, **chosen)
        both = {str(run): outputs, str(against): other_outputs}
        content["against"] = _compare_runs(model, lines, both, console)
    if without_context:
        emptied = predict(model, empty_contexts(model, lines), model.recipe.evaluation.metrics, **chosen)
        both = {"with context": outputs, "without context": emptied}
        content["without_context"] = _compare_runs(model, lines, both, console)
    if json is not None:
        replace_file(json, json_format.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _outputs(
    model: Model, lines: Any, policy: tuple[Policy, int] | None, chosen: dict[str, Any]
) -> tuple[Any, dict[str, float]]:
    """The outputs for held-out lines, and the mean latencies of simultaneous ones."""
    from transduce.evaluation.held_out import predict, predict_simultaneous

    if policy is not None:
        chosen = {name: value for name, value in chosen.items() if name != "detect"}
        return predict_simultaneous(model, lines, *policy, **chosen)
    return predict(model, lines, model.recipe.evaluation.metrics, **chosen), {}


def _calibration(
    model: Model, name: str, lines: Any, outputs: Any, picture: Path | None, console: Console
) -> dict[str, Any] | None:
    """Prints and draws the reliability of the confidence, where the run is calibrated."""
    from transduce.cli.display import show_calibration
    from transduce.evaluation.calibration import draw_reliability, report_calibration

    references = [line.references for line in lines]
    report = report_calibration(model.calibration, outputs, references, fitted_here=name == "dev")
    if report is None:
        if picture is not None:
            raise InputError("this run is not calibrated", where="--reliability", remedy="transduce calibrate RUN")
        return None
    show_calibration(report, console)
    if picture is not None:
        draw_reliability(report, picture)
    return report.to_json()


def calibrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or the folder of an ensemble.")],
    data: Annotated[
        str | None, typer.Argument(metavar="PAIRS", help="Pairs to fit on. [default: the run's development set]")
    ] = None,
    beam: Beam = None,
    settings: Settings = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Fit the confidence of outputs on held-out pairs, and store it in the run.

    Training does this at its end, with the development set. Do it again after the search settings have changed, for an
    ensemble, or for data of another kind.

    Examples:

        transduce calibrate runs/demo

        transduce calibrate runs/demo pairs.tsv --beam 1
    """
    from transduce.evaluation.calibration import QUALITIES
    from transduce.evaluation.held_out import calibrate as fit

    if not run.is_dir():
        raise InputError("no run directory to store a calibration in", where=str(run), remedy="give one of `train`")
    found = fit(load_model(run, device, trust_user_code), data, **generation_settings(settings, beam=beam))
    found.save(run)
    console = open_console()
    errors = f"{found.ece_before:.3f} before, {found.ece_after:.3f} after (cross-validation)"
    console.print(f"confidence is {QUALITIES[found.quality]}, fitted on {found.lines:,} lines", highlight=False)
    console.print(f"expected calibration error: {errors}", highlight=False)


def _evaluate_files(
    files: tuple[list[Path], list[Path], Path | None], metrics: str, json: Path | None, report: Path | None
) -> None:
    import json as json_format

    from transduce.cli.display import show_scores
    from transduce.evaluation.output_files import difference_report, evaluate_files

    console = open_console()
    hypotheses, references, sources = files
    found = evaluate_files(hypotheses, references, parse_yaml(f"[{metrics}]", "--metrics"), sources)
    show_scores(found.systems, console)
    for sentence in found.verdicts:
        console.print(sentence, highlight=False, markup=False)
    for signature in found.signatures:
        console.print(signature, style="dim", highlight=False, markup=False)
    if report is not None:
        replace_file(report, difference_report(found))
    if json is not None:
        replace_file(json, json_format.dumps(found.to_json(), indent=2, ensure_ascii=False) + "\n")


def _compare_runs(model: Model, lines: Any, outputs: dict[str, Any], console: Console) -> dict[str, Any]:
    """Prints the scores of the second run and the significance test of both; returns them."""
    from transduce.cli.display import show_scores
    from transduce.evaluation.held_out import compare_outputs, evaluate_output

    _, (name, other_outputs) = outputs.items()
    scores = evaluate_output(model, lines, other_outputs)
    show_scores({name: scores}, console)
    verdicts = compare_outputs(model, lines, outputs)
    for metric, verdict in verdicts.items():
        console.print(f"{metric}: {verdict}", highlight=False)
    return {"run": name, "verdicts": verdicts, **scores.to_json()}


def probe(
    run: RunArgument,
    data: Annotated[
        str | None,
        typer.Argument(metavar="PAIRS", help="Test pairs. [default: the run's test set, else its development set]"),
    ] = None,
    perturbations: Annotated[
        str,
        typer.Option(
            help="Perturbations, separated by commas: swap, delete, double, ocr, upper, lower, punctuation; "
            "adversarial: of 16 typing errors in each source the worst."
        ),
    ] = "swap,delete,double,ocr,upper,lower,punctuation",
    rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the words or characters that are perturbed.")
    ] = 0.1,
    substitutions: Annotated[
        Path | None, typer.Option(help="Words to exchange, `he TAB she` a line: a probe for bias.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the perturbations.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write all numbers and examples to this JSON file.")] = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Measure how outputs and scores change with typing errors, OCR errors, casing, punctuation, and exchanged words.

    The references stay the same, so a score that falls shows a model that is not robust. With exchanged words, such as
    `he` and `she`, the expected output is the original one with the same words exchanged; any other change is counted.

    Examples:

        transduce probe runs/demo test.tsv

        transduce probe runs/demo test.tsv --perturbations adversarial

        transduce probe runs/en-de --substitutions pronouns.tsv --json probes.json
    """
    import json as json_format

    from transduce.cli.display import show_probes
    from transduce.data.readers.corpus import read_lines
    from transduce.evaluation.held_out import load_held_out
    from transduce.evaluation.robustness import ProbeSettings, parse_substitutions
    from transduce.evaluation.robustness import probe as measure

    names = [name for name in perturbations.split(",") if name]
    pairs = None if substitutions is None else parse_substitutions(read_lines(substitutions), str(substitutions))
    model = load_model(run, device, trust_user_code)
    name, lines = load_held_out(model, data)
    probes = measure(model, lines, ProbeSettings(names, rate, seed, pairs))
    show_probes(probes, open_console())
    if json is not None:
        content = {"set": name, "rate": rate, "seed": seed, "probes": [one.to_json() for one in probes]}
        replace_file(json, json_format.dumps(content, indent=2, ensure_ascii=False) + "\n")


def score(
    run: RunsArgument,
    pairs: Annotated[
        str, typer.Argument(metavar="PAIRS", help="Pairs whose targets are scored; for a language model, text.")
    ],
    output: Output = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, with the score of each token.")
    ] = False,
    settings: Settings = None,
    combination: Combination = None,
    weights: Weights = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Compute the log-probability and the perplexity of given targets: `score TAB perplexity`, one line per pair.

    A language model scores each line of text, or the whole file if it was trained on running text.

    Examples:

        transduce score runs/demo pairs.tsv

        transduce score runs/book book.txt
    """
    from transduce.evaluation.held_out import perplexities, score_file

    model, scored = load_ensemble(run, device, trust_user_code, combination, weights), []
    chosen = generation_settings(settings)
    model.settings(**chosen)  # reports a wrong name or value before any data is read
    with open_output(output, pairs) as stream:
        for one in score_file(model, pairs, as_json=json, **chosen):
            stream.write(one.line + "\n")
            scored.append(one.scored)
    summary = ", ".join(f"{value:.4g} per {unit}" for unit, value in perplexities(scored).items())
    what = "texts" if model.running else "lines" if model.sourceless else "pairs"
    print(f"{len(scored):,} {what}, perplexity {summary}", file=sys.stderr)


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Row of the scoreboard; see --list.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the files of the data set.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings with different seeds.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time, each in a process of its own.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few updates and lines, to see that everything runs; no record is kept.")
    ] = False,
    list_rows: Annotated[
        bool, typer.Option("--list", help="List the rows, their files and published figures.")
    ] = False,
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("scoreboard"),
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/scoreboard"),
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes.")] = Path("recipes"),
) -> None:
    """Train and evaluate a row of the scoreboard, and write its record beside the published figures.

    A record has the recipe, the version, the scores of every seed with 95 % intervals, mean and spread, signatures of
    the metrics, time, hardware, and the numbers of test pairs and sources that also occur in the training data. A
    command that was stopped continues with the seed that the record lacks.

    Examples:

        transduce reproduce --list

        transduce reproduce scan-simple --data scan --seeds 1

        transduce reproduce g2p2021-low --data g2p2021 --jobs 8

        transduce reproduce cmudict --data cmudict --quick
    """
    console = open_console()
    if list_rows or name is None:
        _show_rows(console)
        return
    from concurrent.futures import ProcessPoolExecutor
    from contextlib import nullcontext
    from multiprocessing import get_context

    from transduce.evaluation.reproduction import Reproduction, margins
    from transduce.evaluation.reproduction import reproduce as run_reproduction

    if data is None:
        raise InputError(
            "the folder of the data is missing", where="--data", remedy="transduce reproduce --list names the files"
        )
    task = Reproduction(name, data, runs, records, recipes, quick)
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        record = run_reproduction(task, seeds, lambda line: console.print(line, highlight=False, markup=False), pool)
    for metric, score in record["scores"].items():
        spread = "" if score["spread"] is None else f" ± {score['spread']:.2f}"
        console.print(f"{metric}: {score['mean']:.2f}{spread} of {len(score['seeds'])} seeds", highlight=False)
    for system, metric, points in margins(task.row, record):
        verdict = f"{abs(points):.2f} {'better' if points >= 0 else 'worse'}"
        console.print(f"{metric}: {verdict} than {system}", highlight=False, markup=False)
    console.print(f"record: {task.record_file}", highlight=False, markup=False, soft_wrap=True)


def _show_rows(console: Console) -> None:
    from transduce.evaluation.scoreboard import ROWS

    for name, row in ROWS.items():
        console.print(f"[cyan]{name}[/]  {row.title}", highlight=False, soft_wrap=True)
        console.print(f"    {row.origin}; recipe {row.recipe}", highlight=False, markup=False, soft_wrap=True)
        for published in row.published:
            scores = ", ".join(f"{metric} {value:g}" for metric, value in published.scores.items())
            origin = published.source if published.seen else f"{published.source}, from memory"
            console.print(f"    {scores}: {published.system} ({origin})", highlight=False, markup=False, soft_wrap=True)


def claims(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names of claims; without any, all are listed.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure every claim.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short trainings, for a lecture.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of records, figures, the page index.html, and the trained models.")
    ] = Path("runs/claims"),
    seed: Annotated[int, typer.Option(help="Random seed of data, initial weights and training.")] = 1,
    device: Device = "cpu",
    data: Annotated[
        Path | None, typer.Option(help="Pairs of your own (TSV), measured beside the generated ones: bottleneck.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A run or an imported encoder, measured beside the one trained here: context.")
    ] = None,
) -> None:
    """Measure claims of the literature: tables, figures, JSON records and one HTML page.

    Examples:

        transduce claims

        transduce claims gradient order

        transduce claims --all --quick

    A claim that was measured with the same settings is not measured again: the command continues where it stopped.
    """
    from transduce.evaluation.claims import CLAIMS
    from transduce.evaluation.claims.claim import Budget
    from transduce.evaluation.claims.report import html_page, measure, show, verdict

    console = open_console()
    if not names and not every:
        for claim in CLAIMS.values():
            console.print(f"[cyan]{claim.name:<14}[/] {claim.statement}", highlight=False, soft_wrap=True)
        return
    chosen, measured = _choose(CLAIMS, [] if every else names or []), []
    for number, claim in enumerate(chosen, start=1):
        began, label = time.monotonic(), f"{number} of {len(chosen)}: {claim.name}"
        with console.status(label) as status:

            def report(text: str, label: str = label) -> None:
                status.update(f"{label}, {text}")
                if not console.is_terminal:
                    console.print(f"{label}, {text}", highlight=False)

            record = measure(claim, Budget(out, quick, seed, device, data, model, report))
        measured.append((claim, record))
        show(claim, record, console)
        seconds = time.monotonic() - began
        console.print(f"{label}: {verdict(record.measurement)}, {seconds:.0f} seconds", highlight=False)
        replace_file(out / "index.html", html_page(measured))
    console.print(f"\nrecords, figures and the page are in {out}: index.html", highlight=False, soft_wrap=True)


def _choose(known: dict[str, Claim], names: list[str]) -> list[Claim]:
    for name in names:
        if name not in known:
            raise InputError(f"no claim is called {name!r}", remedy=nearest(name, known))
    return [known[name] for name in names] or list(known.values())
