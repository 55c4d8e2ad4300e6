"""Trial updates of a throw-away network: the largest batch that fits into memory, and the time of an update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch

from transduce import build
from transduce.data.batching import DataPosition, batch_by_length, gather
from transduce.data.noise import add_noise
from transduce.data.prepare import PreparedData, Tokenizers
from transduce.data.row_selection import chunks
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.layers.transformer import enable_gradient_checkpointing
from transduce.model import Transducer
from transduce.objectives import CrossEntropy, Objective
from transduce.recipe import Recipe
from transduce.recipe.compatibility import uses_similarities
from transduce.training.distributed import autocast
from transduce.training.optimisers import build_optimiser
from transduce.training.update import OUT_OF_MEMORY

DEFAULT_TOKENS = 4096  # on a CPU, and the first trial on other devices
MIN_UPDATES_PER_EPOCH = 100  # limits the batch size on small data
MARGIN = 0.8  # fraction of the largest batch that fits: real batches use memory less evenly than the trial
SPECIAL_TOKENS = np.array([1, 2])  # of a source: </s>; of a target: <s> and </s>
MAX_CANDIDATE_ROWS = 100_000  # number of longest rows from which the worst batch is built


def with_batch_tokens(
    recipe: Recipe,
    tokenizers: Tokenizers,
    data: PreparedData,
    objective: Callable[[], Objective],
    device: torch.device,
    processes: int,
) -> Recipe:
    """The recipe with a number instead of `auto`; a recipe with a number does not change."""
    training = recipe.training
    if training.batch_tokens != "auto":
        return recipe
    if device.type == "cpu":
        return _replace_batch_tokens(recipe, DEFAULT_TOKENS)
    micro_batches = processes * training.accumulate  # per update
    tokens = sum(int(data.train.lengths[rows].sum(dtype=np.int64)) for rows in chunks(data.rows))
    run = partial(trial_updates, recipe, tokenizers, data, objective(), device)
    limit = max(DEFAULT_TOKENS, tokens // MIN_UPDATES_PER_EPOCH // micro_batches)
    return _replace_batch_tokens(recipe, micro_batches * largest_fitting(run, limit))


def _replace_batch_tokens(recipe: Recipe, tokens: int) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"batch_tokens": tokens})})


def largest_fitting(run: Callable[[int], object], limit: int, first: int = DEFAULT_TOKENS) -> int:
    """The largest number of tokens up to `limit` with which `run` does not run out of memory, less a margin.

    Doubling, then bisection to a precision of 1/8. Without a failure up to `limit` there is no margin. If nothing
    fits, the result is 1: training splits a batch that does not fit.
    """
    good, bad = 0, None
    while bad is None and good < limit:
        tokens = min(2 * good or min(first, limit), limit)
        if _fits(run, tokens):
            good = tokens
        else:
            bad = tokens
    if bad is None:
        return good
    while bad - good > max(good // 8, 1) and bad > 2:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _fits(run, middle) else (good, middle)
    return max(1, int(MARGIN * good))


def _fits(run: Callable[[int], object], tokens: int) -> bool:
    try:
        run(tokens)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not any(phrase in str(error) for phrase in OUT_OF_MEMORY):
            raise
        return False
    return True


def trial_updates(
    recipe: Recipe, tokenizers: Tokenizers, data: PreparedData, objective: Objective, device: torch.device, tokens: int
) -> None:
    """Two updates of a throw-away network: in the second, the optimiser has allocated its state."""
    source, target = tokenizers
    network = build.build_model(recipe.model, source.size, target.size, source.word_starts)
    batch = worst_batch(recipe, tokenizers, data, tokens)
    for _ in _updates(recipe, network, objective, batch, device, 2):
        pass


def seconds_per_update(
    recipe: Recipe, device: torch.device, vocabulary: tuple[int, int], lengths: tuple[int, int]
) -> float:
    """Time of an update with cross-entropy and random tokens; vocabularies and line lengths are (source, target)."""
    network = build.build_model(recipe.model, *vocabulary)
    budget = DEFAULT_TOKENS if recipe.training.batch_tokens == "auto" else recipe.training.budget
    count = max(1, budget // (sum(lengths) + int(SPECIAL_TOKENS.sum())))
    draw = np.random.default_rng(1)
    sources, targets = (
        draw.integers(min(4, size - 1), size, (count, length)) for size, length in zip(vocabulary, lengths, strict=True)
    )
    batch = Batch(
        Padded.from_rows([[*row, EOS] for row in sources.tolist()]),
        Padded.from_rows([[BOS, *row, EOS] for row in targets.tolist()]),
        rows=tuple(range(count)),
    )
    return median(list(_updates(recipe, network, CrossEntropy(), batch, device, 5))[1:])


def _updates(
    recipe: Recipe, network: Transducer, objective: Objective, batch: Batch, device: torch.device, count: int
) -> Iterator[float]:
    """Updates of a network with the same batch; the seconds that each took."""
    settings = recipe.training
    try:
        network.to(device)
        if settings.gradient_checkpointing:
            enable_gradient_checkpointing(network)
        auxiliary = None if recipe.model.decoder is None else objective.auxiliary_module(recipe.model.decoder["width"])
        if auxiliary is not None:
            network.auxiliary = auxiliary.to(device)
        optimiser = build_optimiser(settings.optimiser, network, layer_decay=settings.layer_decay, unfreeze=None)
        batch = batch.to(device)
        for _ in range(count):
            began = time.monotonic()
            with autocast(device, settings.precision):
                loss = objective(network, batch)
            loss.total.backward()
            optimiser.step()
            optimiser.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield time.monotonic() - began
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def worst_batch(recipe: Recipe, tokenizers: Tokenizers, data: PreparedData, tokens: int) -> Batch:
    """A batch of about `tokens` tokens, of the longest rows where rows differ in length."""
    annotated = recipe.training.objective.get("kind") == "guided_alignment" or uses_similarities(recipe)
    if recipe.data.block_size is not None or annotated:
        return data.batches(_replace_batch_tokens(recipe, tokens), tokenizers).at(DataPosition())
    rows = np.zeros(0, np.int64)
    for part in chunks(data.rows):
        rows = np.concatenate((rows, part))
        rows = rows[np.argsort(-data.train.lengths[rows].max(1), kind="stable")[:MAX_CANDIDATE_ROWS]]
    tokens = tokens if data.noise is None else -(-tokens // 2)
    batch = gather(data.train, rows[batch_by_length(data.train.lengths[rows] + SPECIAL_TOKENS, tokens)[0]])
    return batch if data.noise is None else add_noise(batch, data.noise, recipe.training.seed)
