"""Products, gates and neighbours against torch's own modules, the attention of the model, and exhaustive search."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import transduce
from transduce import Model
from transduce.errors import InputError
from transduce.studio.network_states import (
    attention_modules,
    cell_traces,
    gates,
    index_states,
    neighbours,
    neurons,
    token_states,
    trace_cell,
)


@pytest.fixture(scope="module")
def transformer(transformer_run: Path) -> Model:
    return transduce.load(transformer_run)


def test_products_add_up_to_the_scores_of_every_attention_of_a_transformer(transformer: Model) -> None:
    names = [one["name"] for one in attention_modules(transformer)]
    assert [name.split(".")[0] for name in names] == ["encoder", "decoder", "decoder"]
    explained = transformer.explain("red blue")
    for name in names:
        for head in range(2):
            found = neurons(transformer, "red blue", name, row=2, head=head)
            products, width = np.array(found["products"]), len(found["query"])
            assert np.array(found["keys"]) * np.array(found["query"]) == pytest.approx(products, abs=1e-6)
            logits = [-math.inf if one is None else one for one in found["logits"]]
            visible = np.isfinite(logits)
            expected = products.sum(-1) / math.sqrt(width)
            assert np.array(logits)[visible] == pytest.approx(expected[visible], abs=1e-3)
            assert torch.tensor(logits).softmax(-1).tolist() == pytest.approx(found["weights"], abs=1e-5)
            if "cross" in name:
                assert found["weights"] == pytest.approx(explained.attention[0, head, 2], abs=1e-5)
            if name.startswith("decoder") and "self" in name:
                assert visible.tolist() == [column <= 2 for column in range(len(logits))]


@pytest.mark.parametrize("row", [0, 2])
def test_products_of_a_recurrent_decoder_add_up_to_its_attention(model: Model, row: int) -> None:
    (one,) = attention_modules(model)
    found = neurons(model, "red blue green", one["name"], row=row, head=0)
    sums = torch.tensor(found["products"]).sum(-1) * found["scale"]
    assert sums.softmax(-1).tolist() == pytest.approx(model.explain("red blue green").attention[0, 0, row], abs=1e-5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_traced_cells_are_those_of_torch(kind: type[nn.RNNBase]) -> None:
    layer = kind(3, 4, batch_first=True)
    inputs, count = torch.randn(5, 3), 2 if kind is nn.LSTM else 1
    begin = [torch.randn(4) for _ in range(count)]
    states = tuple(part[None, None] for part in begin)
    with torch.no_grad():
        outputs, _ = layer(inputs[None], states if count == 2 else states[0])
        trace = trace_cell("layer", layer, inputs, begin)
    assert trace.states["hidden"] == pytest.approx(outputs[0].numpy(), abs=1e-6)
    assert all(((one >= 0) & (one <= 1)).all() and one.std() > 0 for one in trace.gates.values())


def test_a_closed_update_gate_keeps_the_state() -> None:
    layer = nn.GRU(2, 3)
    with torch.no_grad():
        layer.bias_ih_l0[3:6] = 100.0  # z = 1: h' = h
        begin = torch.randn(3)
        trace = trace_cell("layer", layer, torch.randn(4, 2), [begin])
    assert trace.gates["update"] == pytest.approx(np.ones((4, 3)))
    assert trace.states["hidden"] == pytest.approx(np.tile(begin.numpy(), (4, 1)), abs=1e-6)


def test_the_states_of_all_layers_are_those_of_the_model(model: Model) -> None:
    _, traces = cell_traces(model, "red blue green")
    (states,) = token_states(model, [("red blue green", model.generate(["red blue green"])[0].text)])
    both = np.concatenate([one.states["hidden"] for one in traces if one.name.startswith("encoder")], 1)
    assert both == pytest.approx(states["encoder"], abs=1e-5)
    found = gates(model, "red blue green")
    assert [len(one["tokens"]) for one in found["layers"]] == [len(one.states["hidden"]) for one in traces]
    assert all(0 <= x <= 1 for one in found["layers"] for gate in one["gates"].values() for row in gate for x in row)


def test_a_training_sentence_is_its_own_nearest_neighbour(model: Model, pairs: Path) -> None:
    index = index_states(model, limit=60)
    source, target = next(pair for pair in index.pairs if len(pair[0].split()) == 4)
    for side in ("encoder", "decoder"):
        found = neighbours(model, index, source, side, 1, k=5, target=target)["neighbours"]
        distances = [one["distance"] for one in found]
        assert len(found) == 5
        assert distances == sorted(distances)
        assert (found[0]["source"], found[0]["target"], found[0]["position"]) == (source, target, 1)
        assert distances[0] == pytest.approx(0, abs=1e-4)
        assert distances[1] > 1e-3
        (query,) = token_states(model, [(source, target)])
        every = [token_states(model, [pair])[0][side] for pair in index.pairs]
        expected = sorted(float(np.linalg.norm(one - query[side][1], axis=1).min()) for one in every)
        assert distances == pytest.approx(expected[:5], abs=1e-4)


def test_neighbours_need_the_training_data(model: Model) -> None:
    moved = copy.copy(model)
    data = moved.recipe.data.model_copy(update={"train": []})
    moved.recipe = moved.recipe.model_copy(update={"data": data})
    with pytest.raises(InputError, match="training data"):
        index_states(moved)
