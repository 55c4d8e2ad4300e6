"""A recipe and a folder in, a trained run out: the one order in which everything happens."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
from transduce.evaluation import evaluate as evaluation
from transduce.evaluation.scoring import answer, as_lines, read_corpora, score_outputs
from transduce.inference import Model
from transduce.inference import load as load_model
from transduce.inference.quantisation import check_learns
from transduce.objectives import Objective
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.storage import replace_file
from transduce.training import trainer as loop
from transduce.training.batch_size import with_budget
from transduce.training.distributed import Processes, pick_device, seed_everything
from transduce.training.report import Report, RunReport, Silent, draw_curves
from transduce.training.resolve import continued, settle, with_packing
from transduce.training.validation import LOWER_IS_BETTER, validation

SHOWN = 5  # examples at the end


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished or interrupted run. The model is the one that training ended with."""

    run: Run
    model: Model
    outcome: loop.Outcome
    scores: dict[str, evaluation.Evaluation]  # by data set: dev, test
    examples: tuple[tuple[str, str, str], ...]  # source, output, reference


def finish(run: Run, model: Model, outcome: loop.Outcome, data: PreparedData) -> Trained:
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


def tell(
    console: Console,
    run: Run,
    recipe: Recipe,
    data: PreparedData,
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
    with transfer.freeze(network, still):
        moving = build.count_parameters(network)
    trained = f", {moving:,} of them trained," if still else ""
    console.print(
        f"{build.count_parameters(network):,} parameters{trained} on {device}; "
        f"recipe, log and checkpoints in {run.folder}",
        highlight=False,
        markup=False,
    )


def tell_transfer(run: Run, taken: transfer.InitReport, console: Console | None, processes: Processes) -> None:
    """What the weights began as, said and kept: the log of a run without a checkpoint begins here."""
    lines = taken.describe()
    if processes.is_main:
        event = {"kind": "event", "event": "init", "step": 0, "text": "\n".join(lines), **taken.to_json()}
        replace_file(run.log, (json.dumps(event, ensure_ascii=False) + "\n").encode())
    if console is not None:
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


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
    check_learns(run.recipe() if run.exists else wanted, str(run.folder))
    device = pick_device(wanted.training.device)
    # A run that goes on has its weights already, and needs no longer those it began from: but adapters stand on them.
    again, adapters = bool(run.checkpoints.steps()), wanted.training.adapters
    origins = [] if again and adapters is None else transfer.open_pretrained(wanted.init)
    with Processes.start(device) as processes:
        console = console if processes.is_main else None
        settled, tokenizers, data = _prepare(run, wanted, processes, origins, device)
        seed_everything(settled.training.seed)
        source, target = tokenizers
        network = build.build_model(settled.model, source.size, target.size, source.starts)
        taken = transfer.load_pretrained(network, settled.model, tokenizers, origins)
        still = settled.training.freeze
        if adapters is not None:
            transfer.add_adapters(network, adapters, taken.runs[0].loaded)
            still += taken.runs[0].loaded
        if console is not None:
            tell(console, run, settled, data, tokenizers, network, device, still)
            if wanted.training.batch_tokens == "auto":
                console.print(f"batches of {settled.training.budget:,} tokens", highlight=False)
        if origins and not again:
            tell_transfer(run, taken, console, processes)
        model = Model(network, *tokenizers, settled)
        objective = _objective(settled, tokenizers, device)
        report: Report = Silent()
        if processes.is_main:
            shown = console or Console(quiet=True)
            report = RunReport(run.folder, console=shown, tensorboard=settled.training.tensorboard)
        with transfer.freeze(network, still), _beside(network, objective, settled):
            outcome = loop.train(
                network,
                data.batches(settled, tokenizers),
                settled.training,
                checkpoints=run.checkpoints,
                report=report,
                processes=processes,
                device=device,
                validate=validation(model, data),
                objective=objective,
                lower_is_better=LOWER_IS_BETTER,
            )
        if outcome.reason == "interrupted" or not processes.is_main:
            return Trained(run, model, outcome, {}, ())
        return finish(run, model, outcome, data)


def _prepare(
    run: Run, wanted: Recipe, processes: Processes, origins: Sequence[transfer.PretrainedRun], device: torch.device
) -> tuple[Recipe, Tokenizers, PreparedData]:
    """The first process writes recipe, tokenizers and stores; the others then find them."""
    if processes.is_main:
        settled = continued(run.recipe(), wanted, str(run.recipe_file)) if run.exists else wanted
        # Without a recipe there is no run: tokenizers left by one that died before it began are not this one's.
        begun = run.exists and run.prepared
        tokenizers = run.tokenizers() if begun else transfer.choose_tokenizers(settled, origins)
        if settled.data.form == "text":  # one side is all there is, whichever was lent
            tokenizers = (tokenizers[0 if settled.model.encoder else 1],) * 2
        transfer.check_pretrained(settled, tokenizers, origins)
        data = prepare_data(settled, tokenizers)
        if not begun:
            for corpus in settled.data.test:  # what cannot be read must show now, not after training
                deque(read_corpus(corpus, settled.data.invalid), maxlen=0)
            run.folder.mkdir(parents=True, exist_ok=True)
            run.save_tokenizers(*tokenizers)
        if not run.exists:
            objective = partial(_objective, settled, tokenizers, device)
            settled = with_budget(settled, tokenizers, data, objective, device, processes.size)
            settled = with_packing(settled, tokenizers, data, objective(), device)
            run.save_recipe(settled)
        processes.barrier()
    else:
        processes.barrier()
        settled, tokenizers = continued(run.recipe(), wanted, str(run.recipe_file)), run.tokenizers()
        data = prepare_data(settled, tokenizers)
    return settled, tokenizers, data


def _objective(recipe: Recipe, tokenizers: Tokenizers, device: torch.device) -> Objective:
    return build.build_objective(recipe.training.objective, partial(_teacher, tokenizers, device))


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
