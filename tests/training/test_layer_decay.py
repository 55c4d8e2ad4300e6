"""Layer-wise learning rates and gradual unfreezing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_fixtures import TinyBatches, TinyModel, loss_on, settings

from transduce.errors import InputError
from transduce.recipe import OptimiserRecipe, build, parse
from transduce.training.checkpoint import CheckpointManager
from transduce.training.optimisers import build_optimiser, clear_frozen_gradients, layer_depths, set_learning_rate
from transduce.training.trainer import train

SMALL = {"width": 8, "layers": 2}
BLOCKS = {"kind": "transformer", "heads": 2, "ff_width": 8, **SMALL}


def built(**model: Any) -> nn.Module:
    tokens = {
        side: {"kind": "labels" if side == "target" and "head" in model else "words"} for side in ("source", "target")
    }
    recipe = build.complete_recipe(parse({"model": model, "tokens": {**tokens, "shared": model.get("tie") == "all"}}))
    return build.build_model(recipe.model, 9, 9)


def by_depth(model: nn.Module) -> list[set[str]]:
    """The name prefixes at each depth, down to the layer."""
    found = layer_depths(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    return [
        {
            ".".join(name.split(".")[: 4 if "rnn" in name else 3 if "layers" in name else 2])
            for name in found
            if found[name] == depth
        }
        for depth in range(max(found.values()) + 1)
    ]


def test_layer_depths_of_a_transformer() -> None:
    assert by_depth(built(encoder=BLOCKS, decoder=BLOCKS)) == [
        {"decoder.output", "decoder.final_norm"},
        {"decoder.layers.1"},
        {"decoder.layers.0"},
        {"encoder.layers.1", "encoder.final_norm"},
        {"encoder.layers.0"},
        {"encoder.embedding", "decoder.embedding"},
    ]


def test_layer_depths_of_recurrent_and_convolutional_models_and_heads() -> None:
    decoder = {"kind": "convolutional", **SMALL}
    assert by_depth(built(encoder={"kind": "recurrent", **SMALL}, decoder=decoder)) == [
        {"decoder.output"},
        {"decoder.layers.1"},
        {"decoder.layers.0"},
        {"encoder.rnn.layers.1"},
        {"encoder.rnn.layers.0"},
        {"encoder.embedding", "decoder.embedding", "decoder.position"},
    ]
    head = by_depth(built(encoder={"kind": "recurrent", **SMALL}, head={"kind": "classifier"}))
    assert all(name.startswith("head.") for name in head[0])
    assert head[1:] == [{"encoder.rnn.layers.1"}, {"encoder.rnn.layers.0"}, {"encoder.embedding"}]


def test_a_tied_weight_has_the_larger_depth() -> None:
    tied = by_depth(built(encoder=BLOCKS, decoder=BLOCKS, tie="all"))
    assert tied[-1] == {"encoder.embedding"}
    assert "decoder.output" in tied[0]  # its bias is its own
    assert sum(map(len, tied)) == 8


def test_frozen_layers_do_not_count() -> None:
    model = built(encoder=BLOCKS, decoder=BLOCKS)
    model.get_submodule("decoder.layers").requires_grad_(False)
    assert max(layer_depths(model).values()) == 3


def test_learning_rate_decays_with_depth() -> None:
    model = built(encoder=BLOCKS, decoder=BLOCKS)
    optimiser = build_optimiser(OptimiserRecipe(weight_decay=0.1), model, layer_decay=0.5)
    set_learning_rate(optimiser, 0.8)
    names, layers = {id(p): name for name, p in model.named_parameters()}, layer_depths(model)
    seen = set()
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            assert group["lr"] == pytest.approx(0.8 * 0.5 ** layers[names[id(parameter)]])
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)
            seen.add(names[id(parameter)])
    assert seen == set(layers)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_layers_are_unfrozen_one_after_the_other(kind: str) -> None:
    model = built(encoder=BLOCKS, decoder=BLOCKS)
    optimiser = build_optimiser(OptimiserRecipe(kind=kind, weight_decay=0.1), model, unfreeze=2)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    layers = layer_depths(model)
    for step in range(1, 14):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        clear_frozen_gradients(optimiser, step)
        set_learning_rate(optimiser, 0.01)
        optimiser.step()
        moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, first[name])}
        assert moved == {name for name, depth in layers.items() if step > 2 * depth}
        known = {name for name, parameter in model.named_parameters() if optimiser.state.get(parameter)}
        assert known == moved  # no moments either


def run(folder: Path, steps: int, **changes: Any) -> dict[str, Tensor]:
    """The weights after `steps` of 12 updates; the run is resumed if it exists."""
    checkpoints, model = CheckpointManager(folder), TinyModel(0.1)
    chosen = settings(steps=12, checkpoint_every=1, validate_every=12, **changes)
    batches = TinyBatches()
    # The constant schedule does not depend on the number of steps.
    halted = chosen.model_copy(
        update={"steps": steps, "schedule": chosen.schedule.model_copy(update={"kind": "constant"})}
    )
    train(model, batches, halted, checkpoints=checkpoints, validate=loss_on(batches))
    return checkpoints.load(steps).weights


@pytest.fixture(scope="module", params=[0.0, 0.9])
def uninterrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    changes = {"unfreeze": 5, "layer_decay": 0.5, "ema": request.param}
    return changes, run(tmp_path_factory.mktemp("whole"), 12, **changes)


@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_run_resumed_before_or_after_unfreezing_equals_an_uninterrupted_one(
    stop: int, uninterrupted: tuple[dict[str, Any], dict[str, Tensor]], tmp_path: Path
) -> None:
    changes, expected = uninterrupted
    run(tmp_path, stop, **changes)
    resumed = run(tmp_path, 12, **changes)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_a_frozen_layer_does_not_change_in_training(tmp_path: Path) -> None:
    model, first = TinyModel(), TinyModel().state_dict()
    train(model, TinyBatches(), settings(steps=5, unfreeze=5), checkpoints=CheckpointManager(tmp_path))
    assert torch.equal(model.embedding.weight, first["embedding.weight"])
    assert not torch.equal(model.mix.weight, first["mix.weight"])
    train(model, TinyBatches(), settings(steps=6, unfreeze=5), checkpoints=CheckpointManager(tmp_path))
    assert not torch.equal(model.embedding.weight, first["embedding.weight"])


@pytest.mark.parametrize("value", ["unfreeze: 0", "layer_decay: 0", "layer_decay: 1.5"])
def test_invalid_settings_are_named(value: str) -> None:
    key, _, number = value.partition(": ")
    with pytest.raises(InputError, match=key):
        parse({"training": {key: float(number)}})
