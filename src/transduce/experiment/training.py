"""A recipe and a folder in, a trained run out: the one order in which everything happens."""

from __future__ import annotations

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
from transduce.data.sources import read
from transduce.errors import InputError
from transduce.experiment.budget import with_budget
from transduce.experiment.packing import with_packing
from transduce.experiment.results import Trained, finish
from transduce.experiment.settling import continued, settle
from transduce.experiment.telling import tell, tell_transfer
from transduce.experiment.validation import LOWER_IS_BETTER, validation
from transduce.objectives import Objective
from transduce.predict import Model
from transduce.predict import load as load_model
from transduce.prepare import Data, Tokenizers, prepare
from transduce.recipe import Recipe
from transduce.run import Run
from transduce.training import loop
from transduce.training.devices import Processes, pick_device, seed_everything
from transduce.training.report import Report, RunReport, Silent


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
    transfer.check_learns(run.recipe() if run.exists else wanted, str(run.folder))
    device = pick_device(wanted.training.device)
    # A run that goes on has its weights already, and needs no longer those it began from: but adapters stand on them.
    again, adapters = bool(run.checkpoints.steps()), wanted.training.adapters
    origins = [] if again and adapters is None else transfer.open_origins(wanted.init)
    with Processes.start(device) as processes:
        console = console if processes.is_main else None
        settled, tokenizers, data = _prepare(run, wanted, processes, origins, device)
        seed_everything(settled.training.seed)
        source, target = tokenizers
        network = build.build_model(settled.model, source.size, target.size, source.starts)
        taken = transfer.take_weights(network, settled.model, tokenizers, origins)
        still = settled.training.freeze
        if adapters is not None:
            transfer.attach(network, adapters, taken.loads[0].taken)
            still += taken.loads[0].taken
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
        with transfer.frozen(network, still), _beside(network, objective, settled):
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
    run: Run, wanted: Recipe, processes: Processes, origins: Sequence[transfer.Origin], device: torch.device
) -> tuple[Recipe, Tokenizers, Data]:
    """The first process writes recipe, tokenizers and stores; the others then find them."""
    if processes.is_main:
        settled = continued(run.recipe(), wanted, str(run.recipe_file)) if run.exists else wanted
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
            objective = partial(_objective, settled, tokenizers, device)
            settled = with_budget(settled, tokenizers, data, objective, device, processes.size)
            settled = with_packing(settled, tokenizers, data, objective(), device)
            run.save_recipe(settled)
        processes.barrier()
    else:
        processes.barrier()
        settled, tokenizers = continued(run.recipe(), wanted, str(run.recipe_file)), run.tokenizers()
        data = prepare(settled, tokenizers)
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
