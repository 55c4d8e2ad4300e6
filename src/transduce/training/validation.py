"""A model in training and its development set in, the numbers that training watches out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from transduce.data.prepare import PreparedData
from transduce.evaluation import evaluate as evaluation
from transduce.evaluation.scoring import answer, as_lines
from transduce.flow import Batch
from transduce.inference import Model
from transduce.objectives import Objective
from transduce.recipe import registry as shelves
from transduce.recipe.compatibility import gives_vectors
from transduce.training import trainer as loop

LOWER_IS_BETTER = loop.LOWER_IS_BETTER | {
    name for name, metric in evaluation.METRICS.items() if not metric.higher_is_better
}


def validation(model: Model, data: PreparedData) -> Callable[[nn.Module], dict[str, float]]:
    """Loss over the development set and metrics over real, greedy generation for part of it."""
    settings = model.recipe
    held_out = as_lines(data.dev_examples(settings.training.validate_examples), settings.evaluation)
    metrics = [evaluation.find(name) for name in settings.evaluation.metrics]
    # Vectors have no likelihood: what they are trained with is what they are watched by.
    watched = settings.training.objective if gives_vectors(settings.model) else None

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
    chosen = {**(watched or {"kind": "cross_entropy", "label_smoothing": 0.0})}
    objective: Objective = shelves.maker(Objective, chosen)()
    device = next(network.parameters()).device
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            loss = objective(network, batch.to(device))
            total, count = total + float(loss.total), count + objective.count(batch)
    return total / max(count, 1)
