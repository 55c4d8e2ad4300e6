"""Gradient checkpointing: the same gradients with fewer stored activations."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from transduce.errors import InputError
from transduce.flow import BOS, EOS, Batch, Padded
from transduce.objectives import CrossEntropy
from transduce.recipe import parse
from transduce.recipe.build import build_model, complete_recipe
from transduce.training.distributed import Processes
from transduce.training.optimisers import build_optimiser
from transduce.training.update import MicroBatch, Update, UpdateBatch

SIZE = 20


def batch_of(rows: int, length: int) -> Batch:
    ids = torch.randint(4, SIZE, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()
    ids = [row[: length - number % 3] for number, row in enumerate(ids)]
    return Batch(Padded.from_rows([[*row, EOS] for row in ids]), Padded.from_rows([[BOS, *row, EOS] for row in ids]))


def update_of(gradient_checkpointing: bool, layers: int = 2, kind: str = "transformer") -> Update:
    part = {"kind": kind, "layers": layers, "width": 16, "dropout": 0.3}
    part |= {"heads": 2, "ff_width": 64} if kind == "transformer" else {}
    given = {
        "model": {"encoder": part, "decoder": part},
        "training": {"gradient_checkpointing": gradient_checkpointing},
    }
    recipe = complete_recipe(parse(given))
    torch.manual_seed(2)
    model = build_model(recipe.model, SIZE, SIZE).train()
    optimiser = build_optimiser(recipe.training.optimiser, model)
    return Update(model, optimiser, CrossEntropy(), recipe.training, Processes(), torch.device("cpu"))


def test_gradient_checkpointing_gives_the_same_weights_with_dropout():
    batch, weights = batch_of(5, 7), []
    for enabled in (False, True):
        update = update_of(enabled)
        for step in range(1, 4):
            result = update(UpdateBatch([MicroBatch(0, batch)], int(batch.labels.mask.sum())), step, 0.01)
            assert not result.nonfinite
        weights.append(update.model.state_dict())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_gradient_checkpointing_stores_fewer_activations():
    def kept(enabled: bool) -> int:
        update, batch = update_of(enabled, layers=6), batch_of(16, 40)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            update._forward_backward(batch, torch.tensor(1.0))
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        return most

    assert kept(True) < kept(False) / 2


def test_gradient_checkpointing_of_recurrent_models_is_refused():
    with pytest.raises(InputError, match="no Transformer blocks"):
        update_of(True, kind="recurrent")
