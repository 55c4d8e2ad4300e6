"""An update that is made before anybody looked: the same weights as one that was looked at first."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from training_fixtures import TinyBatches, TinyModel

from transduce.data.batching import DataPosition
from transduce.flow import Batch
from transduce.objectives import CrossEntropy, Loss, Model
from transduce.recipe import parse
from transduce.training.distributed import Processes
from transduce.training.optimisers import build_optimiser, optimiser_state
from transduce.training.update import MicroBatch, Update, UpdateBatch


class Poisoned(CrossEntropy):
    """Not a number for the third batch, however often one looks."""

    def __call__(self, model: Model, batch: Batch) -> Loss:
        loss = super().__call__(model, batch)
        bad = torch.equal(batch.labels.values, TinyBatches().at(DataPosition(0, 3)).labels.values)
        return Loss(loss.total * float("nan"), loss.parts) if bad else loss


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("clip", [0.5, 1e3, None])  # always, never, not at all
def test_the_same_weights(kind: str, poisoned: bool, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(Update, "asynchronous", property(lambda self, ahead=ahead: ahead))
        settings = parse({"training": {"optimiser": {"kind": kind}, "clip": clip}}).training
        model, batches = TinyModel(), TinyBatches()
        optimiser = build_optimiser(settings.optimiser, model)
        objective = Poisoned() if poisoned else CrossEntropy()
        update = Update(model, optimiser, objective, settings, Processes(), torch.device("cpu"))
        results = []
        for step in range(1, 7):
            batch = batches.at(DataPosition(0, step))
            results.append(update(UpdateBatch([MicroBatch(0, batch)], objective.count(batch)), step, 0.01))
        found.append((model.state_dict(), optimiser_state(optimiser, model), [one.nonfinite for one in results]))
    (weights, memory, bad), (others, remembered, told) = found
    assert bad == told
    assert [number for number, one in enumerate(bad, 1) if one] == ([3] if poisoned else [])
    room = {"rtol": 1e-5, "atol": 1e-7} if clip == 0.5 else {"rtol": 0, "atol": 0}  # a product here, a quotient there
    assert_close(others, weights, **room)
    assert_close(remembered, memory, **room)
