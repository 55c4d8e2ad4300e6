"""The training run of a recipe: preparation, training, validation, evaluation, summary."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from transduce import transfer
from transduce.contracts import Tracker
from transduce.data.batching import DataPosition
from transduce.data.prepare import PreparedData, Tokenizers, prepare_data
from transduce.data.readers.corpus import read_corpus
from transduce.data.tokenizers.tokenizer import Tokenizer
from transduce.errors import InputError
from transduce.evaluation.calibration import FILE as CALIBRATION_FILE
from transduce.evaluation.calibration import Calibration, fit_calibration
from transduce.evaluation.evaluate import Evaluation, find_metric, line_statistics, metric_class
from transduce.evaluation.held_out import evaluate_output, group_references, predict, read_corpora
from transduce.flow import SPECIALS, Batch
from transduce.inference import Model
from transduce.inference import load as load_model
from transduce.inference.quantisation import check_learns
from transduce.modalities.source_encoding import EnsembleSourceEncoding
from transduce.model import Transducer
from transduce.objectives import Objective
from transduce.recipe import GenerationRecipe, Recipe, build, load, registry
from transduce.recipe.compatibility import gives_vectors
from transduce.run import Run, lock_run
from transduce.storage import optional_write, remove_incomplete, replace_file
from transduce.training import trainer
from transduce.training.distributed import Processes, deterministic, pick_device, seed_everything
from transduce.training.report import Report, Reports, RunReport, SilentReport, draw_curves
from transduce.training.resolve import (
    resolve,
    resumed_recipe,
    with_batch_tokens,
    with_packing,
    with_precision,
    with_resolved_values,
    worst_batch,
)
from transduce.training.resume import Provenance

EXAMPLES_SHOWN = 5
VALIDATION_TOKENS = 16_384  # of the sources that a validation searches at once


def lower_is_better(recipe: Recipe) -> frozenset[str]:
    """What may be monitored and improves as it falls: the loss, and error rates among the metrics."""
    metrics = [metric_class(name) for name in recipe.evaluation.metrics]
    return trainer.LOWER_IS_BETTER | {metric.name for metric in metrics if not metric.higher_is_better}


def perfect_scores(recipe: Recipe) -> dict[str, float]:
    """The best possible values of the metrics that have one."""
    metrics = [metric_class(name) for name in recipe.evaluation.metrics]
    return {metric.name: metric.perfect for metric in metrics if metric.perfect is not None}


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """A finished or interrupted run. The model has the final weights."""

    run: Run
    model: Model
    outcome: trainer.Outcome
    scores: dict[str, Evaluation]  # by data set: dev, test
    examples: tuple[tuple[str, str, str], ...]  # source, output, reference


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    folder: str | Path = "runs/latest",
    *,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    console: Console | None = None,
    watcher: Report | None = None,
) -> TrainingResult:
    """Trains the model that the recipe describes. Without a console nothing is printed.

    With `resume`, an existing run continues where it stopped; without an existing run, one is started. The recipe and
    the data must be those that the run began with, except for the recipe keys in `allow_changes`. A watcher receives
    the progress too.
    """
    run, requested = Run(Path(folder)), resolve(recipe)
    device = pick_device(requested.training.device)
    with Processes.start(device) as processes, lock_run(run.folder, processes) as lock:
        console = console if processes.is_main else None
        if console is not None and lock.recovered:
            console.print(f"{lock.recovered} has died: this process takes over its run", highlight=False, markup=False)
        resumed = processes.on_main(lambda: _check_folder(run, requested, resume))
        # A resumed run has its own weights and no longer needs the initial ones, except below adapters.
        needed = not resumed or requested.training.adapters is not None
        origins = transfer.open_pretrained(requested.init) if needed else []
        resolved, tokenizers, data = _prepare(run, requested, processes, origins, device, allow_changes)
        vectors = requested.init.has_vectors and not resumed
        network, init_report, frozen = _build(resolved, tokenizers, origins, vectors)
        if console is not None:
            _print_summary(console, resolved, data, tokenizers)
            _print_parameters(console, run, network, device, frozen)
            if requested.training.batch_tokens == "auto":
                console.print(f"batches of {resolved.training.budget:,} tokens", highlight=False)
        if (origins or vectors) and not resumed:
            _report_initialisation(run, init_report, console, processes)
        model = Model(network, *tokenizers, resolved)
        provenance = Provenance(resolved.model_dump(mode="json"), data.hashes(), allow_changes)
        report = _report(run, resolved, console, processes)
        report = report if watcher is None else Reports(report, watcher)
        outcome = _fit(run, model, data, frozen, report, processes, provenance)
        if outcome.reason == "interrupted" or not processes.is_main:
            return TrainingResult(run, model, outcome, {}, ())
        return _evaluate(run, model, outcome, data)


def is_finished(run: Run, recipe: Recipe) -> bool:
    """Whether the run was completed with this recipe and this data; data files may change under the same name."""
    if not (run.exists and run.metrics() and (run.checkpoints.folder / "final").is_dir()):
        return False
    wanted = with_resolved_values(run.recipe(), recipe)
    if run.recipe() != wanted:
        return False
    identity = run.checkpoints.recorded("identity") or {}
    hashes = prepare_data(wanted, run.tokenizers()).hashes()
    return all(identity.get(key) == value for key, value in hashes.items())


def _check_folder(run: Run, requested: Recipe, resume: bool) -> bool:
    """Whether the folder has checkpoints to resume from. Removes what a killed process left half-written there."""
    steps = run.checkpoints.steps()
    if (run.exists or steps) and not resume:
        raise InputError(
            "there is already a run in this folder",
            where=str(run.folder),
            remedy="continue it with --resume, or give another --run",
        )
    if run.is_ensemble:
        raise InputError(
            "there is an ensemble in this folder, and one network would be trained",
            where=str(run.folder),
            remedy="continue the ensemble with --resume and the options that it began with, or give another --run",
        )
    if steps and not run.exists:
        raise InputError(
            "the run has checkpoints but no recipe.yaml",
            where=str(run.folder),
            remedy=f"restore it: transduce edit-recipe {run.folder}",
        )
    remove_incomplete(run.folder)
    check_learns(run.recorded_recipe() if run.exists else requested, str(run.folder))
    return bool(steps)


def _prepare(
    run: Run,
    requested: Recipe,
    processes: Processes,
    origins: Sequence[transfer.PretrainedRun],
    device: torch.device,
    allow_changes: Sequence[str],
) -> tuple[Recipe, Tokenizers, PreparedData]:
    """The resolved recipe, tokenizers and data. The first process writes them, then the others read them."""
    prepared: list[tuple[Recipe, Tokenizers, PreparedData]] = []

    def prepare() -> None:
        resolved = _continued_recipe(run, requested, allow_changes) if run.exists else requested
        # Without a recipe there is no run: such tokenizers were left by a process that died before training.
        has_tokenizers = run.exists and run.prepared
        tokenizers = run.tokenizers() if has_tokenizers else transfer.choose_tokenizers(resolved, origins)
        if resolved.data.format == "text":  # both sides are the same, whichever was initialised
            tokenizers = (tokenizers[0 if resolved.model.encoder else 1],) * 2
        transfer.check_pretrained(resolved, tokenizers, origins)
        data = prepare_data(resolved, tokenizers)
        if not has_tokenizers:
            for corpus in resolved.data.test:  # unreadable files are reported now, not after training
                deque(read_corpus(corpus, resolved.data.invalid), maxlen=0)
            run.save_tokenizers(*tokenizers)
        if not run.exists:
            objective = partial(_objective, resolved, tokenizers, device)
            resolved = with_precision(resolved, device)
            resolved = with_batch_tokens(resolved, tokenizers, data, objective, device, processes.size)
            resolved = with_packing(resolved, tokenizers, data, objective(), device, processes.size)
            run.save_recipe(resolved)
        prepared.append((resolved, tokenizers, data))

    processes.on_main(prepare)
    if not processes.is_main:
        resolved, tokenizers = run.recipe(), run.tokenizers()
        return resolved, tokenizers, prepare_data(resolved, tokenizers)
    return prepared[0]


def _continued_recipe(run: Run, requested: Recipe, allow_changes: Sequence[str]) -> Recipe:
    """The recipe of a resumed run; recipe.yaml is brought up to date, and the weights are bound to it."""
    saved, where = run.recorded_recipe(), str(run.recipe_file)
    resolved = resumed_recipe(saved, requested, where, allow_changes)
    edited = bool(run.checkpoints.mismatch(run.recipe_file))
    if edited:
        resumed_recipe(saved, load(run.recipe_file), where, allow_changes)
    if edited or resolved != saved:
        run.save_recipe(resolved)
        run.checkpoints.rebind()
    return resolved


def _build(
    recipe: Recipe, tokenizers: Tokenizers, origins: Sequence[transfer.PretrainedRun], vectors: bool
) -> tuple[Transducer, transfer.InitReport, Sequence[str]]:
    """The network with its initial weights, their origin, and the names of the frozen parameters."""
    seed_everything(recipe.training.seed)
    source, target = tokenizers
    with deterministic(recipe.training.deterministic):  # an orthogonal matrix depends on the number of threads
        network = build.build_model(recipe.model, source.size, target.size, source.word_starts)
    init_report = transfer.load_pretrained(network, recipe.model, tokenizers, origins)
    if vectors:
        lines = transfer.load_word_vectors(network, recipe.init, tokenizers)
        init_report = dataclasses.replace(init_report, vectors=tuple(lines))
    frozen = recipe.training.freeze
    if recipe.training.adapters is not None:
        transfer.add_adapters(network, recipe.training.adapters, init_report.runs[0].loaded)
        frozen += init_report.runs[0].loaded
    return network, init_report, frozen


def _fit(
    run: Run,
    model: Model,
    data: PreparedData,
    frozen: Sequence[str],
    report: Report,
    processes: Processes,
    provenance: Provenance,
) -> trainer.Outcome:
    """Runs the trainer; afterwards the model has the final weights."""
    recipe, tokenizers = model.recipe, (model.source, model.target)
    device = pick_device(recipe.training.device)
    objective = _objective(recipe, tokenizers, device)
    largest = _largest_batch(recipe, tokenizers, data) if device.type == "cuda" else None
    with transfer.freeze(model.network, frozen), _auxiliary_module(model.network, objective, recipe):
        return trainer.train(
            model.network,
            data.batches(recipe, tokenizers),
            recipe.training,
            checkpoints=run.checkpoints,
            report=report,
            processes=processes,
            device=device,
            validate=validation(model, data),
            objective=objective,
            lower_is_better=lower_is_better(recipe),
            perfect=perfect_scores(recipe),
            provenance=provenance,
            largest_batch=largest,
        )


def _largest_batch(recipe: Recipe, tokenizers: Tokenizers, data: PreparedData) -> Batch:
    """A batch that takes as much memory as any. All packed batches have one shape."""
    if recipe.training.packing is True:
        return data.batches(recipe, tokenizers).at(DataPosition())
    return worst_batch(recipe, tokenizers, data, recipe.training.budget)


def _objective(recipe: Recipe, tokenizers: Tokenizers, device: torch.device) -> Objective:
    return build.build_objective(recipe.training.objective, partial(_teacher, tokenizers, device))


def _teacher(tokenizers: Tokenizers, device: torch.device, folder: str) -> nn.Module:
    """The network of a trained run or an ensemble. It reads the same batches, so it must have the same tokenizers."""
    model = load_model(folder, device=str(device))
    if isinstance(model.source_encoding, EnsembleSourceEncoding):
        raise InputError(
            "the members of the teacher read different source tokens",
            where=folder,
            remedy="distil its outputs: transduce distil --level sequence",
        )
    if [one.fingerprint for one in (model.source, model.target)] != [one.fingerprint for one in tokenizers]:
        raise InputError(
            "the tokenizers of the teacher differ from those of this run",
            where=folder,
            remedy="train both from the same data with the same `tokens`",
        )
    return model.network.requires_grad_(False)


@contextmanager
def _auxiliary_module(network: nn.Module, objective: Objective, recipe: Recipe) -> Iterator[None]:
    """Inside, the trainable module of the objective (if any) is part of the network: trained, saved and resumed."""
    decoder = recipe.model.decoder
    module = None if decoder is None else objective.auxiliary_module(decoder["width"])
    if module is not None:
        network.auxiliary = module
    try:
        yield
    finally:
        if module is not None:
            del network.auxiliary


def _report(run: Run, recipe: Recipe, console: Console | None, processes: Processes) -> Report:
    if not processes.is_main:
        return SilentReport()
    specs = [registry.complete(Tracker, spec, "training.trackers") for spec in recipe.training.trackers]
    content = recipe.model_dump(mode="json")
    trackers = [registry.factory(Tracker, spec)(run.folder, content) for spec in specs]
    return RunReport(run.folder, console=console or Console(quiet=True), trackers=trackers)


def _print_summary(console: Console, recipe: Recipe, data: PreparedData, tokenizers: Tokenizers) -> None:
    """Prints what was read, before training."""
    for line in data.train.describe():
        console.print(line, highlight=False, markup=False)
    sizes = " and ".join(map(_describe_vocabulary, dict.fromkeys(tokenizers)))
    padding = data.batches(recipe, tokenizers).padding(0)
    console.print(
        f"{len(data.rows):,} {data.train.unit} to train on, {len(data.dev_rows):,} held out; vocabulary {sizes}; "
        f"padding {padding:.1%}",
        highlight=False,
    )


def _describe_vocabulary(tokenizer: Tokenizer) -> str:
    """Size and kind of a vocabulary. Labels are counted without the special tokens, as a user counts classes."""
    size = tokenizer.size - len(SPECIALS) if tokenizer.kind == "labels" else tokenizer.size
    return f"{size:,} {tokenizer.kind}"


def _print_parameters(
    console: Console, run: Run, network: nn.Module, device: torch.device, frozen: Sequence[str]
) -> None:
    with transfer.freeze(network, frozen):
        trainable = build.count_parameters(network)
    note = f", {trainable:,} of them trained," if frozen else ""
    console.print(
        f"{build.count_parameters(network):,} parameters{note} on {device}; "
        f"recipe, log and checkpoints in {run.folder}",
        highlight=False,
        markup=False,
    )


def _report_initialisation(
    run: Run, init_report: transfer.InitReport, console: Console | None, processes: Processes
) -> None:
    """Prints and logs the origin of the initial weights, as the first entry of the log."""
    lines = init_report.describe()
    if processes.is_main:
        event = {"kind": "event", "event": "init", "step": 0, "text": "\n".join(lines), **init_report.to_json()}
        with optional_write(run.log, "training goes on"):
            replace_file(run.log, json.dumps(event, ensure_ascii=False) + "\n")
    if console is not None:
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def validation(model: Model, data: PreparedData) -> Callable[[nn.Module], dict[str, float]]:
    """The validation function: loss on the development set, metrics of greedy output for a part of it."""
    settings = model.recipe
    held_out = group_references(data.dev_examples(settings.training.validate_examples), settings.evaluation)
    metrics = [find_metric(name) for name in settings.evaluation.metrics]
    # An embedding model has no likelihood: its validation loss is its training objective.
    objective = settings.training.objective if gives_vectors(settings.model) else None
    together = _validation_tokens(settings.generation)

    def validate(network: nn.Module) -> dict[str, float]:
        scores = {"loss": development_loss(network, data.dev_batches(settings), objective)}
        output = predict(model, held_out, settings.evaluation.metrics, strategy="greedy", batch_tokens=together)
        references = [line.references for line in held_out]
        for metric in metrics:
            statistics = line_statistics(metric, output, references)
            scores[metric.name] = metric.value(statistics.sum(0))
        return scores

    return validate


def _validation_tokens(generation: GenerationRecipe) -> int:
    """Tokens of the sources that a validation searches at once; for few, a step takes a GPU as long.

    Greedy search has one hypothesis for each: they are no more than those of the search of the recipe.
    """
    hypotheses = 1 if generation.strategy_kind == "greedy" else generation.beam
    return max(generation.batch_tokens, min(VALIDATION_TOKENS, hypotheses * generation.batch_tokens))


def development_loss(network: nn.Module, batches: Iterable[Batch], objective: Mapping[str, Any] | None = None) -> float:
    """Mean loss per token: of the objective given, else the negative log-likelihood without label smoothing."""
    chosen = {**(objective or {"kind": "cross_entropy", "label_smoothing": 0.0})}
    criterion: Objective = registry.factory(Objective, chosen)()
    device = next(network.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            loss = criterion(network, batch.to(device))
            total, count = total + float(loss.total), count + criterion.count(batch)
    return total / max(count, 1)


def _calibrate(run: Run, model: Model, calibration: Calibration | None) -> None:
    """Stores the calibration that was fitted on the development set with the final weights."""
    model.calibration = calibration
    if calibration is not None:
        with optional_write(run.folder / CALIBRATION_FILE, "predictions of the run will have no confidence"):
            calibration.save(run.folder)


def _evaluate(run: Run, model: Model, outcome: trainer.Outcome, data: PreparedData) -> TrainingResult:
    """Evaluates the final weights on the held-out sets; writes metrics.json and curves.png."""
    settings = model.recipe
    sets = {"dev": data.dev_examples()}
    if settings.data.test:
        sets["test"] = read_corpora(settings.data.test, model)
    scores: dict[str, Evaluation] = {}
    shown: list[tuple[str, str, str]] = []
    for name, examples in sets.items():
        lines = group_references(examples, settings.evaluation)
        output = predict(model, lines, settings.evaluation.metrics)
        scores[name] = evaluate_output(model, lines, output)
        if name == "dev" and output.noised is None:
            _calibrate(run, model, fit_calibration(output, [line.references for line in lines]))
        texts = zip(lines, output.texts or (), strict=output.texts is not None)
        shown = [(line.source, text, line.references[0]) for line, text in texts][:EXAMPLES_SHOWN]
        if output.texts is not None and output.noised is not None:
            restored = zip(output.noised.sources, output.texts, output.noised.references, strict=True)
            shown = [(source, text, references[0]) for source, text, references in restored][:EXAMPLES_SHOWN]
    metrics = {
        **{name: score.to_json() for name, score in scores.items()},
        "parameters": model.parameters,
        "training": dataclasses.asdict(outcome),
        "data": data.train.report.to_json(),
    }
    with optional_write(run.metrics_file, "the scores are only printed"):
        run.save_metrics(metrics)
    with optional_write(run.curves, "there is no picture of the learning curves"):
        draw_curves(run.log, run.curves)
    return TrainingResult(run, model, outcome, scores, tuple(shown))
