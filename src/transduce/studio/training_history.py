"""Runs over time and side by side: a training in progress, one input through checkpoints, and through several runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter
from torch.nn import functional as F

from transduce.data.prepare import prepare_data
from transduce.errors import InputError
from transduce.flow import Example
from transduce.inference import Model, load
from transduce.inference.prediction import Prediction
from transduce.run import Run
from transduce.studio.attention import Text
from transduce.studio.network_states import encode_sources
from transduce.studio.runs import Studio, StudioRun
from transduce.training.report import read_log

CHECKPOINTS = 12  # of a run that are compared; more are thinned
KEPT_PARAMETERS = 5_000_000  # of a model whose checkpoints stay in memory
POINTS = 400  # of a curve; longer ones are thinned
UPDATE_FIELDS = ("loss", "nll", "learning_rate", "gradient_norm", "tokens_per_second", "padding", "seconds")


def token_diff(before: Sequence[str], after: Sequence[str]) -> list[dict[str, Any]]:
    """The edits that lead from one output to another: equal, insert, delete or replace, with the tokens of both."""
    matcher = SequenceMatcher(None, list(before), list(after), autojunk=False)
    return [
        {"kind": kind, "before": list(before[a:b]), "after": list(after[c:d])}
        for kind, a, b, c, d in matcher.get_opcodes()
    ]


def attention_entropy(weights: np.ndarray) -> np.ndarray:
    """The entropy of each row (... S) as a share of its maximum: 0 is one position, 1 is uniform attention."""
    size = weights.shape[-1]
    logs = np.log(np.maximum(weights, 1e-30))
    return -(weights * logs).sum(-1) / math.log(size) if size > 1 else np.zeros(weights.shape[:-1])


def describe_output(prediction: Prediction) -> dict[str, Any]:
    """An output with its attention, averaged over layers and heads."""
    explained, entropy = prediction.explanation, None
    weights = None if explained is None or explained.attention is None else explained.attention.mean((0, 1))
    if weights is not None:
        entropy = float(attention_entropy(weights).mean())
    return {
        "source": prediction.source,
        "output": prediction.text,
        "tokens": list(prediction.tokens),
        "token_scores": list(prediction.token_scores),
        "score": prediction.score,
        "source_tokens": [] if explained is None else list(explained.source_tokens),
        "weights": None if weights is None else weights.tolist(),
        "entropy": entropy,
    }


def through_models(
    models: Iterable[tuple[Any, Model]], text: str, baseline: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """One input through several models, given with their names, in their order.

    Each output comes with its differences from the tokens of the baseline, or else from those of the model before it.
    """
    found: list[dict[str, Any]] = []
    for name, model in models:
        one = describe_output(model.generate([text], long_sources="truncate")[0])
        before = baseline or (found[-1]["tokens"] if found else one["tokens"])
        found.append({"name": name, **one, "changes": token_diff(before, one["tokens"])})
    return found


def quality_by_length(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The scores of a finished run by the length of its sources, of the first set that has them: by metric."""
    for part in Run(folder).metrics().values():
        if isinstance(part, dict) and part.get("by_length"):
            found: dict[str, list[dict[str, Any]]] = part["by_length"]
            return found
    return {}


def training_progress(folder: Path) -> dict[str, Any]:
    """What a run has logged so far: curves, development scores, events, checkpoints."""
    run = Run(folder)
    log = read_log(run.log)
    updates = [one for one in log if one.get("kind") == "update"]
    thinned = updates[:: max(1, math.ceil(len(updates) / POINTS))]
    if updates and thinned[-1] is not updates[-1]:
        thinned.append(updates[-1])
    return {
        "running": run.in_training,
        "steps": run.recorded_recipe().training.steps,
        "updates": [{name: one.get(name) for name in ("step", *UPDATE_FIELDS)} for one in thinned],
        "validations": [_without_kind(one) for one in log if one.get("kind") == "validation"],
        "events": [_without_kind(one) for one in log if one.get("kind") == "event"][-20:],
        "checkpoints": run.checkpoints.steps(),
    }


def _without_kind(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "kind"}


def development_examples(model: Model, count: int = 4) -> list[Example]:
    """The first pairs of the development set."""
    examples = prepare_data(model.recipe, (model.source, model.target)).dev_examples(count)
    if not examples:
        raise InputError("this run has no development set", remedy="train with data.dev, or data.dev_size")
    return examples


def checkpoint_state(model: Model, examples: Sequence[Example]) -> dict[str, Any]:
    """How the model of one checkpoint does: outputs of examples, entropy of its attention, gradient norms by layer."""
    predictions = model.generate([one.source for one in examples], long_sources="truncate")
    outputs = [describe_output(one) for one in predictions]
    entropies = [one["entropy"] for one in outputs if one["entropy"] is not None]
    return {
        "outputs": [{**one, "reference": example.target} for one, example in zip(outputs, examples, strict=True)],
        "entropy": sum(entropies) / len(entropies) if entropies else None,
        "gradient_norms": gradient_norms(model, examples),
    }


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, or its first two parts."""
    match = re.match(r"(.*?\.\d+)\.", parameter)
    return match[1] if match else ".".join(parameter.split(".")[:2])


def gradient_norms(model: Model, examples: Sequence[Example]) -> dict[str, float]:
    """The norm of the gradient of the loss of these examples, layer by layer: negative log-likelihood per token."""
    sources = encode_sources(model, [one.source for one in examples])
    targets = [model.target.encode(one.target or "").ids for one in examples]
    batch = model.source_encoding.batch(sources, targets).to(model.device)
    named = {name: one for name, one in model.network.named_parameters() if one.requires_grad}
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):  # cuDNN has no backward pass in eval mode
        logits, labels = model.network(batch).logits, batch.labels
        loss = F.cross_entropy(logits[labels.mask], labels.values[labels.mask])
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    squares: dict[str, float] = {}
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + float(gradient.float().square().sum())
    return {name: math.sqrt(value) for name, value in squares.items()}


def checkpoint_steps(run: StudioRun) -> list[int]:
    """The steps of the checkpoints of a run, oldest first: the last one, and some of the others."""
    folder = _folder(run)
    steps = Run(folder).checkpoints.steps()
    kept = steps[:: -max(1, math.ceil(len(steps) / CHECKPOINTS))][::-1]
    if not kept:
        raise InputError("this run has no checkpoints", where=str(folder), remedy="train it: each checkpoint is kept")
    return kept


def checkpoint_model(run: StudioRun, step: int) -> Model:
    """The model of one checkpoint; small ones are kept."""
    # The run itself is open, so code that it names has been allowed.
    opened = partial(load, _folder(run), device=str(run.model.device), trust_user_code=True, step=step)
    return run.once(("checkpoint", step), opened) if run.model.parameters <= KEPT_PARAMETERS else opened()


def checkpoint_models(run: StudioRun) -> Iterator[tuple[int, Model]]:
    return ((step, checkpoint_model(run, step)) for step in checkpoint_steps(run))


def router(studio: Studio) -> APIRouter:
    routes = APIRouter()

    @routes.get("/checkpoints")
    def checkpoints(run: str = "", source: Text = "", other: str = "") -> dict[str, Any]:
        chosen, baseline = studio.run(run), studio.run(other or run)
        with baseline.lock:  # one lock after the other: two requests never wait for each other
            (compared,) = through_models([(baseline.name, baseline.model)], source)
        with chosen.lock:
            found = through_models(checkpoint_models(chosen), source, compared["tokens"])
        return {"checkpoints": found, "other": compared}

    @routes.get("/ladder")
    def ladder(source: Text = "") -> dict[str, Any]:
        runs = [
            one for one in studio.runs.values() if one.model.source_encoding.reads_text and not one.model.sourceless
        ]
        rungs = []
        for one in runs:
            with one.lock:
                (found,) = through_models([(one.name, one.model)], source)
            lengths = {} if one.folder is None else quality_by_length(one.folder)
            rungs.append({**found, "by_length": lengths, "parts": one.describe()["parts"]})
        return {"rungs": rungs}

    @routes.get("/training")
    def training(run: str = "") -> dict[str, Any]:
        return training_progress(_folder(studio.run(run)))

    @routes.get("/training/checkpoints")
    def states(run: str = "") -> dict[str, Any]:
        chosen = studio.run(run)
        examples = chosen.once("development examples", lambda: development_examples(chosen.model))

        def state(step: int) -> dict[str, Any]:
            return {"step": step, **checkpoint_state(checkpoint_model(chosen, step), examples)}

        steps = checkpoint_steps(chosen)
        return {"checkpoints": [chosen.once(("checkpoint state", step), partial(state, step)) for step in steps]}

    return routes


def _folder(run: StudioRun) -> Path:
    if run.folder is None:
        raise InputError("this model was not trained here", remedy="choose the folder of a run")
    return run.folder
