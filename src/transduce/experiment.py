"""A recipe in, a run directory out: prepared data, a trained model, its scores."""

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

from transduce import build, evaluation, transfer
from transduce.contracts import TextMetric, VectorMetric
from transduce.data.sources import read
from transduce.disk import replace_file
from transduce.errors import InputError, nearest
from transduce.flow import Batch
from transduce.objectives import Objective
from transduce.predict import Model
from transduce.predict import load as load_model
from transduce.prepare import Data, Tokenizers, prepare
from transduce.recipe import Corpus, Recipe, parse
from transduce.recipe import load as load_recipe
from transduce.run import Run
from transduce.score import answer, as_lines, read_corpora, score_outputs
from transduce.training import loop
from transduce.training.curves import draw_curves
from transduce.training.devices import Processes, pick_device, seed_everything
from transduce.training.report import Report, RunReport, Silent

# What may change when a run goes on; everything else must be as it was.
CHANGEABLE = frozenset({"steps", "minutes", "device", "patience", "keep", "log_every", "tensorboard"})
SHOWN = 5  # examples at the end
LOWER_IS_BETTER = loop.LOWER_IS_BETTER | {
    name for name, metric in evaluation.METRICS.items() if not metric.higher_is_better
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished or interrupted run. The model is the one that training ended with."""

    run: Run
    model: Model
    outcome: loop.Outcome
    scores: dict[str, evaluation.Evaluation]  # by data set: dev, test
    examples: tuple[tuple[str, str, str], ...]  # source, output, reference


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    folder: str | Path = "runs/latest",
    *,
    resume: bool = False,
    console: Console | None = None,
) -> Trained:
    """Trains what the recipe describes. Without a console nothing is printed.

    With `resume`, a run that exists goes on where it stopped; one that does not is begun.
    """
    run, wanted = Run(Path(folder)), settle(recipe)
    if (run.exists or run.checkpoints.steps()) and not resume:
        raise InputError(
            "there is a run here already", where=str(run.folder), remedy="go on with --resume, or give another --run"
        )
    device = pick_device(wanted.training.device)
    # A run that goes on has its weights already, and needs no longer those it began from: but adapters stand on them.
    again, adapters = bool(run.checkpoints.steps()), wanted.training.adapters
    origins = [] if again and adapters is None else transfer.open_origins(wanted.init)
    with Processes.start(device) as processes:
        console = console if processes.is_main else None
        settled, tokenizers, data = _prepare(run, wanted, processes, origins)
        seed_everything(settled.training.seed)
        source, target = tokenizers
        network = build.build_model(settled.model, source.size, target.size, source.starts)
        taken = transfer.take_weights(network, settled.model, tokenizers, origins)
        still = settled.training.freeze
        if adapters is not None:
            transfer.attach(network, adapters, taken.loads[0].taken)
            still += taken.loads[0].taken
        if console is not None:
            _tell(console, run, settled, data, tokenizers, network, device, still)
        if origins and not again:
            _tell_transfer(run, taken, console, processes)
        model = Model(network, *tokenizers, settled)
        objective = build.build_objective(settled.training.objective, partial(_teacher, tokenizers, device))
        report: Report = Silent()
        if processes.is_main:
            shown = console or Console(quiet=True)
            report = RunReport(run.folder, console=shown, tensorboard=settled.training.tensorboard)
        with transfer.frozen(network, still), _beside(network, objective, settled):
            outcome = loop.train(
                network,
                data.batches(settled, tokenizers),
                settled.training,
                checkpoints=run.checkpoints,
                report=report,
                processes=processes,
                device=device,
                validate=_validation(model, data),
                objective=objective,
                lower_is_better=LOWER_IS_BETTER,
            )
        if outcome.reason == "interrupted" or not processes.is_main:
            return Trained(run, model, outcome, {}, ())
        return _finish(run, model, outcome, data)


@contextmanager
def _beside(network: nn.Module, objective: Objective, recipe: Recipe) -> Iterator[None]:
    """Inside, what the objective learns beside the model is part of it: trained, kept and resumed like any weight."""
    decoder = recipe.model.decoder
    learned = None if decoder is None else objective.beside(decoder["width"])
    if learned is not None:
        network.beside = learned
    try:
        yield
    finally:
        if learned is not None:
            del network.beside


def settle(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    """A recipe in any form, completed and checked, its files named in full."""
    if isinstance(recipe, (str, Path)):
        recipe = load_recipe(recipe)
    elif not isinstance(recipe, Recipe):
        recipe = parse(recipe)
    data = recipe.data
    sets = {name: tuple(map(_absolute, getattr(data, name))) for name in ("train", "dev", "test")}
    completed = build.complete_recipe(recipe.model_copy(update={"data": data.model_copy(update=sets)}))
    _check_measures(completed)
    if completed.training.freeze:
        with torch.device("meta"):  # the names are those of any vocabulary
            transfer.frozen_names(build.build_model(completed.model, 8, 8), completed.training.freeze)
    if completed.training.adapters is not None:
        with torch.device("meta"):
            transfer.targets(build.build_model(completed.model, 8, 8), completed.training.adapters)
    named = {name: str(Path(folder).absolute()) for name, folder in completed.init if folder is not None}
    return _with_teacher(completed.model_copy(update={"init": completed.init.model_copy(update=named)}))


def _with_teacher(recipe: Recipe) -> Recipe:
    """A teacher is named in full, and missing before anything is made rather than after."""
    objective = recipe.training.objective
    if "teacher" not in objective:
        return recipe
    run = Run(Path(objective["teacher"]).absolute())
    run.recipe()
    named = recipe.training.model_copy(update={"objective": {**objective, "teacher": str(run.folder)}})
    return recipe.model_copy(update={"training": named})


def _teacher(tokenizers: Tokenizers, device: torch.device, folder: str) -> nn.Module:
    """The network of a trained run, to learn from: it reads the same batches, so its tokens must be the same."""
    model = load_model(folder, device=str(device))
    if [one.fingerprint for one in (model.source, model.target)] != [one.fingerprint for one in tokenizers]:
        raise InputError(
            "the teacher has other tokens than this run",
            where=folder,
            remedy="train both from the same data with the same `tokens`",
        )
    return model.network.requires_grad_(False)


def _check_measures(recipe: Recipe) -> None:
    """What training watches and ends with must be known before it begins, and before a folder is made for it."""
    metrics, monitor = recipe.evaluation.metrics, recipe.training.monitor
    for name in metrics:
        if name not in evaluation.METRICS:
            remedy = nearest(name, evaluation.METRICS)
            raise InputError(f"there is no metric {name!r}", where="evaluation.metrics", remedy=remedy)
    vectors = build.gives_vectors(recipe.model)
    for name in metrics:
        if issubclass(evaluation.METRICS[name], VectorMetric) != vectors:
            fitting = [one for one, kind in evaluation.METRICS.items() if issubclass(kind, VectorMetric) == vectors]
            problem = f"{name} needs {'a model that writes' if vectors else 'the head embedder, which gives vectors'}"
            remedy = f"set evaluation.metrics to some of: {', '.join(fitting)}"
            raise InputError(problem, where="evaluation.metrics", remedy=remedy)
    if recipe.data.form == "text" and recipe.model.encoder is None:
        texts = [name for name in metrics if issubclass(evaluation.METRICS[name], TextMetric)]
        if texts:
            remedy = f"set evaluation.metrics: [{', '.join(build.LANGUAGE_METRICS)}]"
            problem = f"{texts[0]} compares outputs, and a language model has no source to write one for"
            raise InputError(problem, where="evaluation.metrics", remedy=remedy)
    if monitor != "loss" and monitor not in metrics:
        known = monitor in evaluation.METRICS
        remedy = f"add {monitor} to evaluation.metrics" if known else nearest(monitor, ["loss", *metrics])
        raise InputError(f"there is no {monitor!r} to watch", where="training.monitor", remedy=remedy)


def _absolute(corpus: Corpus) -> Corpus:
    """A run must find its data again, wherever it is resumed from."""
    files = ("path",) if corpus.path is not None else ("source", "target", "alignment")
    names = [name for name in files if getattr(corpus, name) is not None]
    return corpus.model_copy(update={name: str(Path(getattr(corpus, name)).absolute()) for name in names})


def _prepare(
    run: Run, wanted: Recipe, processes: Processes, origins: Sequence[transfer.Origin]
) -> tuple[Recipe, Tokenizers, Data]:
    """The first process writes recipe, tokenizers and stores; the others then find them."""
    if processes.is_main:
        settled = _continued(run.recipe(), wanted, str(run.recipe_file)) if run.exists else wanted
        # Without a recipe there is no run: tokenizers left by one that died before it began are not this one's.
        begun = run.exists and run.prepared
        tokenizers = run.tokenizers() if begun else transfer.choose_tokenizers(settled, origins)
        if settled.data.form == "text":  # one side is all there is, whichever was lent
            tokenizers = (tokenizers[0 if settled.model.encoder else 1],) * 2
        transfer.check_origins(settled, tokenizers, origins)
        data = prepare(settled, tokenizers)
        if not begun:
            for corpus in settled.data.test:  # what cannot be read must show now, not after training
                deque(read(corpus, settled.data.invalid), maxlen=0)
            run.folder.mkdir(parents=True, exist_ok=True)
            run.save_tokenizers(*tokenizers)
        if not run.exists:
            run.save_recipe(settled)
        processes.barrier()
    else:
        processes.barrier()
        settled, tokenizers = _continued(run.recipe(), wanted, str(run.recipe_file)), run.tokenizers()
        data = prepare(settled, tokenizers)
    return settled, tokenizers, data


def _continued(saved: Recipe, wanted: Recipe, where: str) -> Recipe:
    """The saved recipe with the changes that a run may have when it goes on."""
    old, new = _flat(saved.model_dump()), _flat(wanted.model_dump())
    for key in sorted(old.keys() | new.keys()):
        section, _, name = key.partition(".")
        if old.get(key) != new.get(key) and not (section == "training" and name in CHANGEABLE):
            raise InputError(
                f"{key} was {old.get(key)!r} when this run began and is {new.get(key)!r} now",
                where=where,
                remedy="resume with the recipe it began with, or start a new run",
            )
    return wanted


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in content.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        result.update(inner)
    return result


def _tell(
    console: Console,
    run: Run,
    recipe: Recipe,
    data: Data,
    tokenizers: Tokenizers,
    network: nn.Module,
    device: torch.device,
    still: Sequence[str],
) -> None:
    """What was read and what was built, before the long part begins."""
    for line in data.train.describe():
        console.print(line, highlight=False, markup=False)
    sizes = " and ".join(f"{tokenizer.size:,} {tokenizer.kind}" for tokenizer in dict.fromkeys(tokenizers))
    padding = data.batches(recipe, tokenizers).padding(0)
    console.print(
        f"{len(data.rows):,} {data.train.what} to train on, {len(data.dev_rows):,} held out; vocabulary {sizes}; "
        f"padding {padding:.1%}",
        highlight=False,
    )
    with transfer.frozen(network, still):
        moving = build.count_parameters(network)
    trained = f", {moving:,} of them trained," if still else ""
    console.print(
        f"{build.count_parameters(network):,} parameters{trained} on {device}; "
        f"recipe, log and checkpoints in {run.folder}",
        highlight=False,
        markup=False,
    )


def _tell_transfer(run: Run, taken: transfer.Transfer, console: Console | None, processes: Processes) -> None:
    """What the weights began as, said and kept: the log of a run without a checkpoint begins here."""
    lines = taken.describe()
    if processes.is_main:
        event = {"kind": "event", "event": "init", "step": 0, "text": "\n".join(lines), **taken.to_json()}
        replace_file(run.log, (json.dumps(event, ensure_ascii=False) + "\n").encode())
    if console is not None:
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _validation(model: Model, data: Data) -> Callable[[nn.Module], dict[str, float]]:
    """Loss over the development set and metrics over real, greedy generation for part of it."""
    settings = model.recipe
    held_out = as_lines(data.dev_examples(settings.training.validate_examples), settings.evaluation)
    metrics = [evaluation.find(name) for name in settings.evaluation.metrics]
    # Vectors have no likelihood: what they are trained with is what they are watched by.
    watched = settings.training.objective if build.gives_vectors(settings.model) else None

    def validate(network: nn.Module) -> dict[str, float]:
        scores = {"loss": development_loss(network, data.dev_batches(settings), watched)}
        outputs = answer(model, held_out, settings.evaluation.metrics, strategy="greedy")
        references = [line.references for line in held_out]
        for metric in metrics:
            statistics = evaluation.statistics_of(metric, outputs, references)
            scores[metric.name] = metric.value(statistics.sum(0))
        return scores

    return validate


def development_loss(network: nn.Module, batches: Iterable[Batch], watched: Mapping[str, Any] | None = None) -> float:
    """Mean negative log-probability of a development token, without smoothing; or of the objective to be watched."""
    objective: Objective = build.maker(Objective, {**(watched or {"kind": "cross_entropy", "label_smoothing": 0.0})})()
    device = next(network.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            loss = objective(network, batch.to(device))
            total, count = total + float(loss.total), count + loss.count
    return total / max(count, 1)


def _finish(run: Run, model: Model, outcome: loop.Outcome, data: Data) -> Trained:
    """Scores what was held out, and writes down how it went."""
    settings = model.recipe
    sets = {"dev": data.dev_examples()}
    if settings.data.test:
        sets["test"] = read_corpora(settings.data.test, model)
    scores: dict[str, evaluation.Evaluation] = {}
    shown: list[tuple[str, str, str]] = []
    for name, examples in sets.items():
        lines = as_lines(examples, settings.evaluation)
        outputs = answer(model, lines, settings.evaluation.metrics)
        scores[name] = score_outputs(model, lines, outputs)
        texts = zip(lines, outputs.texts or (), strict=outputs.texts is not None)
        shown = [(line.source, text, line.references[0]) for line, text in texts][:SHOWN]
        if outputs.texts is not None and outputs.asked is not None:
            asked = zip(outputs.asked.sources, outputs.texts, outputs.asked.references, strict=True)
            shown = [(source, text, references[0]) for source, text, references in asked][:SHOWN]
    run.save_metrics(
        {
            **{name: score.to_json() for name, score in scores.items()},
            "parameters": model.parameters,
            "training": dataclasses.asdict(outcome),
            "data": data.train.report.to_json(),
        }
    )
    draw_curves(run.log, run.curves)
    return Trained(run, model, outcome, scores, tuple(shown))
