"""A recipe that says `batch_tokens: auto` in, the same with a number out: the largest batch that fits the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from transduce import build
from transduce.data.batching import DataPosition, batch_by_length, gather
from transduce.data.epoch_plan import chunks
from transduce.data.noise import add_noise
from transduce.data.prepare import PreparedData, Tokenizers
from transduce.flow import Batch
from transduce.layers.transformer import recompute
from transduce.objectives import Objective
from transduce.recipe import Recipe
from transduce.training.distributed import autocast
from transduce.training.optimisers import build_optimiser
from transduce.training.update import OUT_OF_MEMORY

PLAIN = 4096  # tokens: on a CPU, and what is tried first elsewhere
UPDATES = 100  # in an epoch at least: larger batches would learn too seldom
MARGIN = 0.8  # of what fits: memory is never used as evenly as in a trial
SPECIAL = np.array([1, 2])  # </s>; <s> and </s>
LONGEST = 100_000  # rows among which the worst batch is looked for


def with_budget(
    recipe: Recipe,
    tokenizers: Tokenizers,
    data: PreparedData,
    objective: Callable[[], Objective],
    device: torch.device,
    processes: int,
) -> Recipe:
    """The recipe with a number of tokens; one that has a number already stays as it is."""
    training = recipe.training
    if training.batch_tokens != "auto":
        return recipe
    if device.type == "cpu":
        return _said(recipe, PLAIN)
    shares = processes * training.accumulate  # an update is computed in so many pieces
    tokens = sum(int(data.train.lengths[rows].sum(dtype=np.int64)) for rows in chunks(data.rows))
    run = partial(_try, recipe, tokenizers, data, objective(), device)
    return _said(recipe, shares * largest(run, max(PLAIN, tokens // UPDATES // shares)))


def _said(recipe: Recipe, tokens: int) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"batch_tokens": tokens})})


def largest(run: Callable[[int], object], most: int, first: int = PLAIN) -> int:
    """The largest budget up to `most` with which `run` does not run out of memory, to an eighth, less a margin.

    Where all fit there is no end to keep away from. Where nothing does, a batch will be split and redone.
    """
    good, bad = 0, None
    while bad is None and good < most:
        budget = min(2 * good or min(first, most), most)
        if _fits(run, budget):
            good = budget
        else:
            bad = budget
    if bad is None:
        return good
    while bad - good > max(good // 8, 1) and bad > 2:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _fits(run, middle) else (good, middle)
    return max(1, int(MARGIN * good))


def _fits(run: Callable[[int], object], budget: int) -> bool:
    try:
        run(budget)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not any(phrase in str(error) for phrase in OUT_OF_MEMORY):
            raise
        return False
    return True


def _try(
    recipe: Recipe, tokenizers: Tokenizers, data: PreparedData, objective: Objective, device: torch.device, budget: int
) -> None:
    """Two updates of a network that is thrown away: in the second the optimiser has all that it keeps."""
    settings, (source, target) = recipe.training, tokenizers
    try:
        network = build.build_model(recipe.model, source.size, target.size, source.starts).to(device)
        if settings.checkpoint_layers:
            recompute(network)
        learned = None if recipe.model.decoder is None else objective.beside(recipe.model.decoder["width"])
        if learned is not None:
            network.beside = learned.to(device)
        optimiser = build_optimiser(settings.optimiser, network, layer_decay=settings.layer_decay, unfreeze=None)
        batch = worst_batch(recipe, tokenizers, data, budget).to(device)
        for _ in range(2):
            with autocast(device, settings.precision):
                loss = objective(network, batch)
            loss.total.backward()
            optimiser.step()
            optimiser.zero_grad()
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def worst_batch(recipe: Recipe, tokenizers: Tokenizers, data: PreparedData, budget: int) -> Batch:
    """A batch of so many tokens, made of the longest rows where rows differ."""
    if recipe.data.passage is not None or recipe.training.objective.get("kind") == "guided_alignment":
        return data.batches(_said(recipe, budget), tokenizers).at(DataPosition())
    rows = np.zeros(0, np.int64)
    for part in chunks(data.rows):  # the longest so far
        rows = np.concatenate((rows, part))
        rows = rows[np.argsort(-data.train.lengths[rows].max(1), kind="stable")[:LONGEST]]
    budget = budget if data.noise is None else -(-budget // 2)
    batch = gather(data.train, rows[batch_by_length(data.train.lengths[rows] + SPECIAL, budget)[0]])
    return batch if data.noise is None else add_noise(batch, data.noise, recipe.training.seed)
