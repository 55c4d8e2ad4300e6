"""Resolution of a recipe before training: defaults, checks, paths, packing, the largest batch that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce import transfer
from transduce.attention.multihead import Attend
from transduce.attention.positions import max_positions
from transduce.contracts import PositionEncoding, TextMetric, VectorMetric
from transduce.data.batching import ROW_LENGTH, DataPosition, batch_by_length, gather
from transduce.data.noise import add_noise
from transduce.data.prepare import PreparedData, Tokenizers
from transduce.data.row_selection import chunks
from transduce.errors import InputError, nearest
from transduce.evaluation.evaluate import METRICS, find_metrics
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.interop import as_run
from transduce.layers.transformer import enable_gradient_checkpointing
from transduce.model import Transducer
from transduce.objectives import CrossEntropy, Objective
from transduce.recipe import Corpus, Recipe, build, changed_keys, describe_changes, parse
from transduce.recipe import load as load_recipe
from transduce.recipe.build import meta_device
from transduce.recipe.compatibility import gives_vectors, uses_similarities
from transduce.run import Run
from transduce.training.distributed import autocast, computes_in_bf16
from transduce.training.optimisers import build_optimiser
from transduce.training.resume import is_allowed
from transduce.training.update import OUT_OF_MEMORY

# Keys that may change when a run is resumed.
CHANGEABLE = frozenset(
    {"steps", "minutes", "device", "patience", "min_epochs", "keep", "log_every", "parallel", "trackers"}
)
DEFAULT_TOKENS = 4096  # on a CPU, and the first trial on other devices
MIN_UPDATES_PER_EPOCH = 100  # limits the batch size on small data
MARGIN = 0.8  # fraction of the largest batch that fits: real batches use memory less evenly than the trial
SPECIAL_TOKENS = np.array([1, 2])  # of a source: </s>; of a target: <s> and </s>
MAX_CANDIDATE_ROWS = 100_000  # number of longest rows from which the worst batch is built


def resolve(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    """A complete and checked recipe with absolute paths, from a recipe in any form."""
    if isinstance(recipe, (str, Path)):
        recipe = load_recipe(recipe)
    elif not isinstance(recipe, Recipe):
        recipe = parse(recipe)
    data = recipe.data
    sets = {name: tuple(map(Corpus.absolute, getattr(data, name))) for name in ("train", "dev", "test")}
    completed = build.complete_recipe(recipe.model_copy(update={"data": data.model_copy(update=sets)}))
    completed = _with_metric_models(completed)
    _check_metrics(completed)
    if completed.training.freeze:
        with meta_device():  # names of weights do not depend on the vocabulary
            transfer.frozen_names(build.build_model(completed.model, 8, 8), completed.training.freeze)
    if completed.training.adapters is not None:
        with meta_device():
            transfer.adapter_targets(build.build_model(completed.model, 8, 8), completed.training.adapters)
    named = {
        name: str((Path(place) if name.endswith("_vectors") else as_run(place)).absolute())
        for name, place in completed.init
        if place is not None
    }
    complete = _with_teacher(completed.model_copy(update={"init": completed.init.model_copy(update=named)}))
    # Parts give defaults such as tuples, which YAML has not: as JSON, the recipe equals the one that a run reads back.
    return parse(complete.model_dump(mode="json"))


def _with_teacher(recipe: Recipe) -> Recipe:
    """Absolute paths of the teacher or its members; a missing one is an error before training starts."""
    objective = recipe.training.objective
    if "teacher" not in objective:
        return recipe
    paths = [Path(name).absolute() for name in objective["teacher"].split(",") if name]
    for path in paths:
        for member in Run(path).members() or [path]:
            Run(member).recipe()
    teacher = ",".join(map(str, paths))
    named = recipe.training.model_copy(update={"objective": {**objective, "teacher": teacher}})
    return recipe.model_copy(update={"training": named})


def _with_metric_models(recipe: Recipe) -> Recipe:
    """Absolute paths of the models of metrics."""
    metrics: list[str | dict[str, Any]] = []
    for spec in recipe.evaluation.metrics:
        if isinstance(spec, dict) and isinstance(model := spec.get("model"), str):
            spec = {**spec, "model": str(Path(model).absolute())}
        metrics.append(spec)
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"metrics": tuple(metrics)})})


def _check_metrics(recipe: Recipe) -> None:
    """Refuses metrics that do not exist or do not fit the model before anything is computed or written."""
    metrics = {metric.name: type(metric) for metric in find_metrics(recipe.evaluation.metrics)}
    vectors, where = gives_vectors(recipe.model), "evaluation.metrics"
    for name, metric in metrics.items():
        if issubclass(metric, VectorMetric) != vectors:
            suitable = [one for one, kind in METRICS.items() if issubclass(kind, VectorMetric) == vectors]
            problem = f"{name} needs {'a model that writes' if vectors else 'the head embedder, which gives vectors'}"
            remedy = f"set evaluation.metrics to some of: {', '.join(suitable)}"
            raise InputError(problem, where=where, remedy=remedy)
        if recipe.data.format == "text" and recipe.model.encoder is None and issubclass(metric, TextMetric):
            remedy = f"set evaluation.metrics: [{', '.join(build.LANGUAGE_METRICS)}]"
            problem = f"{name} compares outputs, and a language model has no source to write one for"
            raise InputError(problem, where=where, remedy=remedy)
    monitor, names = recipe.training.monitor, ["loss", *(metric.name for metric in metrics.values())]
    if monitor not in names:
        remedy = f"add {monitor} to evaluation.metrics" if monitor in METRICS else nearest(monitor, names)
        raise InputError(f"there is no {monitor!r} to monitor", where="training.monitor", remedy=remedy)


def with_resolved_values(saved: Recipe, wanted: Recipe) -> Recipe:
    """Replaces `auto` by the values that the saved run resolved."""
    found = {name: getattr(saved.training, name) for name in ("batch_tokens", "packing", "precision")}
    left = {name: value for name, value in found.items() if getattr(wanted.training, name) == "auto"}
    return wanted.model_copy(update={"training": wanted.training.model_copy(update=left)})


def resumed_recipe(saved: Recipe, wanted: Recipe, where: str, allowed: Sequence[str] = ()) -> Recipe:
    """The recipe of a resumed run; keys other than CHANGEABLE and the allowed ones must be unchanged."""
    wanted = with_resolved_values(saved, wanted)
    changes = changed_keys(saved, wanted)
    refused = {key: values for key, values in changes.items() if not _may_change(key, allowed)}
    if refused:
        way = ""
        if not any(key.startswith("tokens.") for key in refused):
            way = ", or accept the changes: " + " ".join(f"--allow-change {key}" for key in refused)
        raise InputError(
            "the recipe has changed since this run began:\n  " + "\n  ".join(describe_changes(refused)),
            where=where,
            remedy=f"resume with the recipe it began with, start a new run{way}",
        )
    return wanted


def _may_change(key: str, allowed: Sequence[str]) -> bool:
    section, _, name = key.partition(".")
    if section == "tokens":  # the tokenizers are trained already
        return False
    return (section == "training" and name in CHANGEABLE) or is_allowed(key, allowed)


def with_precision(recipe: Recipe, device: torch.device) -> Recipe:
    """Resolves `training.precision: auto`."""
    if recipe.training.precision != "auto":
        return recipe
    chosen = "bf16" if computes_in_bf16(device) else "fp32"
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"precision": chosen})})


def with_packing(
    recipe: Recipe,
    tokenizers: Tokenizers,
    data: PreparedData,
    objective: Objective,
    device: torch.device,
    processes: int = 1,
) -> Recipe:
    """Resolves `training.packing`: `auto` packs with CUDA graphs and fused attention, if all parts allow it."""
    requested = recipe.training.packing
    if requested is False:
        return recipe
    source, target = tokenizers
    with meta_device():
        network = build.build_model(recipe.model, source.size, target.size, source.word_starts)
    reason = packing_obstacle(recipe, network, data, objective)
    if requested is True and reason:
        raise InputError(f"training.packing: {reason}", remedy="leave it out, or set it to false")
    captured = recipe.training.cuda_graphs and (processes == 1 or recipe.training.parallel != "fsdp")
    pays = device.type == "cuda" and captured and _fused(network)
    packs = not reason and (requested is True or pays)
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"packing": packs})})


def _fused(network: nn.Module) -> bool:
    """Whether attention is fused: unfused, packed rows would store several times as many scores."""
    kinds = (type(part) for part in network.modules() if isinstance(part, PositionEncoding))
    attentions = (part for part in network.modules() if isinstance(part, Attend))
    return all(kind.bias is PositionEncoding.bias for kind in kinds) and all(one.fused for one in attentions)


def packing_obstacle(recipe: Recipe, network: Transducer, data: PreparedData, objective: Objective) -> str:
    """The reason why batches cannot be packed; empty: they can."""
    end = max_positions(network)
    dropout = recipe.tokens.source.dropout or recipe.tokens.target.dropout
    texts = recipe.data.block_size is None and data.noise is None and data.train.items is None
    for wrong, reason in (
        (not network.supports_packing, "only a Transformer encoder and decoder, both of attention, can be packed"),
        (not objective.supports_packing, "this objective does not read packed batches"),
        (not texts or data.train.sourceless, "only pairs of texts can be packed"),
        (bool(dropout), "with BPE dropout the lengths of texts change"),
        (end is not None and end < ROW_LENGTH, f"rows have up to {ROW_LENGTH} tokens, and the model has {end}"),
        (data.packing(recipe) is None, f"{recipe.training.budget} tokens are not one row of a packed batch"),
    ):
        if wrong:
            return reason
    return ""


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
    recipe = with_precision(recipe, device)
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
