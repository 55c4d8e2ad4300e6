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

from transduce import build, transfer
from transduce.data.prepare import PreparedData, Tokenizers, prepare_data
from transduce.data.readers.corpus import read_corpus
from transduce.errors import InputError
from transduce.evaluation.evaluate import Evaluation, find_metric, line_statistics, metric_class
from transduce.evaluation.held_out import evaluate_output, group_references, predict, read_corpora
from transduce.flow import Batch
from transduce.inference import Model
from transduce.inference import load as load_model
from transduce.inference.quantisation import check_learns
from transduce.model import Transducer
from transduce.objectives import Objective
from transduce.recipe import Recipe, registry
from transduce.recipe.compatibility import gives_vectors
from transduce.run import Run
from transduce.storage import optional_write, replace_file
from transduce.training import trainer
from transduce.training.batch_size import with_batch_tokens
from transduce.training.distributed import Processes, pick_device, seed_everything
from transduce.training.report import Report, RunReport, SilentReport, draw_curves
from transduce.training.resolve import resolve, resumed_recipe, with_packing

EXAMPLES_SHOWN = 5


def lower_is_better(recipe: Recipe) -> frozenset[str]:
    """What may be monitored and improves as it falls: the loss, and error rates among the metrics."""
    metrics = [metric_class(name) for name in recipe.evaluation.metrics]
    return trainer.LOWER_IS_BETTER | {metric.name for metric in metrics if not metric.higher_is_better}


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
    console: Console | None = None,
) -> TrainingResult:
    """Trains the model that the recipe describes. Without a console nothing is printed.

    With `resume`, an existing run continues where it stopped; without an existing run, one is started.
    """
    run, requested = Run(Path(folder)), resolve(recipe)
    if (run.exists or run.checkpoints.steps()) and not resume:
        raise InputError(
            "there is already a run in this folder",
            where=str(run.folder),
            remedy="continue it with --resume, or give another --run",
        )
    check_learns(run.recipe() if run.exists else requested, str(run.folder))
    device = pick_device(requested.training.device)
    # A resumed run has its own weights and no longer needs the initial ones, except below adapters.
    resumed, adapters = bool(run.checkpoints.steps()), requested.training.adapters
    origins = [] if resumed and adapters is None else transfer.open_pretrained(requested.init)
    with Processes.start(device) as processes:
        console = console if processes.is_main else None
        resolved, tokenizers, data = _prepare(run, requested, processes, origins, device)
        network, init_report, frozen = _build(resolved, tokenizers, origins)
        if console is not None:
            _print_summary(console, resolved, data, tokenizers)
            _print_parameters(console, run, network, device, frozen)
            if requested.training.batch_tokens == "auto":
                console.print(f"batches of {resolved.training.budget:,} tokens", highlight=False)
        if origins and not resumed:
            _report_initialisation(run, init_report, console, processes)
        model = Model(network, *tokenizers, resolved)
        outcome = _fit(run, model, data, frozen, console, processes, device)
        if outcome.reason == "interrupted" or not processes.is_main:
            return TrainingResult(run, model, outcome, {}, ())
        return _evaluate(run, model, outcome, data)


def _prepare(
    run: Run, requested: Recipe, processes: Processes, origins: Sequence[transfer.PretrainedRun], device: torch.device
) -> tuple[Recipe, Tokenizers, PreparedData]:
    """The resolved recipe, tokenizers and data. The first process writes them, then the others read them."""
    if processes.is_main:
        resolved = resumed_recipe(run.recipe(), requested, str(run.recipe_file)) if run.exists else requested
        # Without a recipe there is no run: such tokenizers were left by a process that died before training.
        prepared = run.exists and run.prepared
        tokenizers = run.tokenizers() if prepared else transfer.choose_tokenizers(resolved, origins)
        if resolved.data.format == "text":  # both sides are the same, whichever was initialised
            tokenizers = (tokenizers[0 if resolved.model.encoder else 1],) * 2
        transfer.check_pretrained(resolved, tokenizers, origins)
        data = prepare_data(resolved, tokenizers)
        if not prepared:
            for corpus in resolved.data.test:  # unreadable files are reported now, not after training
                deque(read_corpus(corpus, resolved.data.invalid), maxlen=0)
            run.folder.mkdir(parents=True, exist_ok=True)
            run.save_tokenizers(*tokenizers)
        if not run.exists:
            objective = partial(_objective, resolved, tokenizers, device)
            resolved = with_batch_tokens(resolved, tokenizers, data, objective, device, processes.size)
            resolved = with_packing(resolved, tokenizers, data, objective(), device)
            run.save_recipe(resolved)
        processes.barrier()
    else:
        processes.barrier()
        resolved, tokenizers = resumed_recipe(run.recipe(), requested, str(run.recipe_file)), run.tokenizers()
        data = prepare_data(resolved, tokenizers)
    return resolved, tokenizers, data


def _build(
    recipe: Recipe, tokenizers: Tokenizers, origins: Sequence[transfer.PretrainedRun]
) -> tuple[Transducer, transfer.InitReport, Sequence[str]]:
    """The network with its initial weights, their origin, and the names of the frozen parameters."""
    seed_everything(recipe.training.seed)
    source, target = tokenizers
    network = build.build_model(recipe.model, source.size, target.size, source.word_starts)
    init_report = transfer.load_pretrained(network, recipe.model, tokenizers, origins)
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
    console: Console | None,
    processes: Processes,
    device: torch.device,
) -> trainer.Outcome:
    """Runs the trainer; afterwards the model has the final weights."""
    recipe, tokenizers = model.recipe, (model.source, model.target)
    objective = _objective(recipe, tokenizers, device)
    with transfer.freeze(model.network, frozen), _auxiliary_module(model.network, objective, recipe):
        return trainer.train(
            model.network,
            data.batches(recipe, tokenizers),
            recipe.training,
            checkpoints=run.checkpoints,
            report=_report(run, recipe, console, processes),
            processes=processes,
            device=device,
            validate=validation(model, data),
            objective=objective,
            lower_is_better=lower_is_better(recipe),
        )


def _objective(recipe: Recipe, tokenizers: Tokenizers, device: torch.device) -> Objective:
    return build.build_objective(recipe.training.objective, partial(_teacher, tokenizers, device))


def _teacher(tokenizers: Tokenizers, device: torch.device, folder: str) -> nn.Module:
    """The network of a trained run. It reads the same batches, so it must have the same tokenizers."""
    model = load_model(folder, device=str(device))
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
    return RunReport(run.folder, console=console or Console(quiet=True), tensorboard=recipe.training.tensorboard)


def _print_summary(console: Console, recipe: Recipe, data: PreparedData, tokenizers: Tokenizers) -> None:
    """Prints what was read, before training."""
    for line in data.train.describe():
        console.print(line, highlight=False, markup=False)
    sizes = " and ".join(f"{tokenizer.size:,} {tokenizer.kind}" for tokenizer in dict.fromkeys(tokenizers))
    padding = data.batches(recipe, tokenizers).padding(0)
    console.print(
        f"{len(data.rows):,} {data.train.unit} to train on, {len(data.dev_rows):,} held out; vocabulary {sizes}; "
        f"padding {padding:.1%}",
        highlight=False,
    )


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

    def validate(network: nn.Module) -> dict[str, float]:
        scores = {"loss": development_loss(network, data.dev_batches(settings), objective)}
        output = predict(model, held_out, settings.evaluation.metrics, strategy="greedy")
        references = [line.references for line in held_out]
        for metric in metrics:
            statistics = line_statistics(metric, output, references)
            scores[metric.name] = metric.value(statistics.sum(0))
        return scores

    return validate


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
