"""Measures of maps with known answers: uniform swap, shuffled weights, seeds, the step at which attention is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_fixtures import make, shared
from run_fixtures import Command, colour_pairs
from scipy.spatial.distance import jensenshannon

import transduce
from transduce.errors import InputError
from transduce.explain.attribution import METHODS, AttributionInput, attribute, raw_attention
from transduce.explain.faithfulness import (
    UNCHANGED,
    Faithfulness,
    UniformSwap,
    measure,
    seed_variance,
    shuffled_decoder,
    uniform_swap,
)
from transduce.flow import EOS, Batch, Padded

IDS = (5, 9, 4, EOS)


def pair_of(network: torch.nn.Module) -> AttributionInput:
    return AttributionInput(network, Batch(Padded.from_rows([[6, 4, 10, 7, 5, EOS]])), IDS)


def test_uniform_swap_is_the_rise_of_the_loss_with_equal_scores() -> None:
    """Oracle: queries of zero give every row the same score."""
    network = make("transformer>transformer")
    inputs = pair_of(network)
    found = uniform_swap(inputs)
    assert found is not None
    assert np.shape(found.heads) == (2, 2)
    with torch.no_grad():
        before = inputs.log_probabilities(inputs.batch)
        part = network.decoder.layers[1].cross_attention
        part.q_proj.weight[part.head_width :] = 0
        part.q_proj.bias[part.head_width :] = 0
        one = inputs.log_probabilities(inputs.batch)
        part.q_proj.weight[:] = 0
        part.q_proj.bias[:] = 0
        layer = inputs.log_probabilities(inputs.batch)
    assert found.heads[1][1] == pytest.approx(float((before - one).mean()), abs=1e-5)
    assert found.layers[1] == pytest.approx(float((before - layer).mean()), abs=1e-5)


def test_a_head_without_output_is_not_to_be_read() -> None:
    network = make("transformer>transformer")
    with torch.no_grad():
        part = network.decoder.layers[0].cross_attention
        part.out_proj.weight[:, : part.head_width] = 0
    found = uniform_swap(pair_of(network))
    assert found is not None
    assert found.heads[0][0] == pytest.approx(0, abs=1e-6)
    assert "do not read it" in found.head_verdict(0, 0)
    assert found.to_json()["head_verdicts"][0][0] == found.head_verdict(0, 0)


def test_a_model_without_changeable_attention_has_no_uniform_swap() -> None:
    assert uniform_swap(pair_of(shared("transformer>hard_attention"))) is None


def test_shuffled_weights_have_the_same_values_in_another_order() -> None:
    network = shared("transformer>transformer")
    other = shuffled_decoder(network, 1)
    pairs = list(zip(network.decoder.parameters(), other.decoder.parameters(), strict=True))
    assert all(torch.equal(one.flatten().sort().values, new.flatten().sort().values) for one, new in pairs)
    assert any(not torch.equal(one, new) for one, new in pairs)
    assert all(one is new for one, new in zip(network.encoder.parameters(), other.encoder.parameters(), strict=True))


def test_a_trained_map_depends_on_the_weights(model: transduce.Model) -> None:
    """Spearman below 0.3 with the maps of shuffled weights; a map of the positions alone does not change at all."""
    found, rises = [], []
    for source, target in colour_pairs(12):
        explained = model.explain(source, target, ["attention"])
        found.append(explained.faithfulness["attention"].randomisation)
        assert explained.uniform_swap is not None
        rises.append(explained.uniform_swap.all)
        assert explained.uniform_swap.verdict in explained.verdict
    assert np.mean(found) < UNCHANGED
    assert np.mean(rises) > 0.2


def test_a_map_that_ignores_the_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def position(inputs: AttributionInput) -> torch.Tensor:
        weights = raw_attention(inputs)
        return torch.arange(weights.size(1)).expand_as(weights) + 1.0

    monkeypatch.setitem(METHODS, "attention", position)
    inputs = pair_of(shared("transformer>transformer"))
    weights = attribute(inputs, "attention")
    measured = measure(inputs, {"attention": weights}, weights)["attention"]
    assert measured.randomisation == pytest.approx(1.0)
    assert "shuffled" in replace(measured, baseline_change=1.0).verdict


def test_seed_variance_equals_scipy() -> None:
    chance = np.random.default_rng(4)
    maps = [chance.random((3, 5)) for _ in range(3)]
    pairs = [(maps[0], maps[1]), (maps[0], maps[2]), (maps[1], maps[2])]
    expected = np.mean([jensenshannon(one, other, axis=1, base=2) ** 2 for one, other in pairs])
    assert seed_variance(maps) == pytest.approx(expected)
    assert seed_variance([maps[0], 2 * maps[0]]) == pytest.approx(0)
    assert seed_variance([np.eye(2), np.eye(2)[::-1]]) == pytest.approx(1)
    with pytest.raises(InputError, match="cannot be compared"):
        seed_variance([maps[0], maps[1][:2]])


def test_seeds_are_compared_beside_the_map(model: transduce.Model) -> None:
    ((source, target),) = colour_pairs(1)
    same = model.explain(source, target, ["attention"], seeds=[model, model])
    assert same.faithfulness["attention"].seed_variance == pytest.approx(0, abs=1e-9)
    other = model.explain(source, target, ["attention"], seeds=[model.intervene(["uniform:cross:all"])])
    assert other.to_json()["faithfulness"]["attention"]["seed_variance"] > 0.1
    assert not model.explain(source, target, ["attention"], measures=False).faithfulness


def test_attention_is_read_where_a_token_is_output_or_input(model: transduce.Model) -> None:
    ((source, target),) = colour_pairs(1)
    shown, shifted = (model.explain(source, target, read_at=step) for step in ("output", "input"))
    assert shifted.map().weights[:-1] == pytest.approx(shown.map().weights[1:])
    assert shifted.map().weights[-1] == pytest.approx(shown.map().weights[-1])
    assert (shifted.attention == shown.attention).all()
    assert shifted.to_json()["read_at"] == "input"
    with pytest.raises(InputError, match="not read at"):
        model.explain(source, target, read_at="later")


def test_commands_state_the_step(attention_run: Path, tmp_path: Path, command: Command) -> None:
    ((source, target),) = colour_pairs(1)
    pairs, gold, record = tmp_path / "pairs.tsv", tmp_path / "gold.txt", tmp_path / "rate.json"
    pairs.write_text(f"{source}\t{target}\n")
    gold.write_text(" ".join(f"{n}-{n}" for n in range(len(target.split()))) + "\n")
    aligned = command("align", attention_run, pairs, "--gold", gold, "--read-at", "input", "--json", record)
    assert "read at the step that reads each token as input" in aligned.err
    assert json.loads(record.read_text())["read_at"] == "input"
    seeds = ("--seed-run", attention_run, "--method", "attention")
    called = command("explain", attention_run, source, "--target", target, *seeds)
    assert "read at the step that outputs each token" in called.out, called.err
    assert "divergence of the seeds 0.000 bits" in called.out
    assert command("explain", attention_run, source, "--read-at", "never").code != 0


def test_a_source_matters_where_a_deletion_does() -> None:
    """A source of zeros may give the output its probability by chance; rows that cost something still matter."""
    measured = Faithfulness(1.2, 0.3, 0.1, 0.9, (1.2,) * 5, 0.8, None, baseline_change=0.01, randomisation=0.1)
    assert "12.0 times" in measured.verdict
    assert "hardly depends" in replace(measured, comprehensiveness=0.02, sufficiency=-0.01).verdict


@pytest.mark.parametrize(("marked", "drawn"), [(0.3, 0.3), (0.1, 0.4), (0.04, -0.6), (-0.2, -0.4)])
def test_marked_rows_that_cost_nothing_more_are_not_to_be_read(marked: float, drawn: float) -> None:
    measured = Faithfulness(marked, 0.1, drawn, 0.9, (marked,) * 5, 0.8, None, baseline_change=1.0, randomisation=0.1)
    assert "do not read it" in measured.verdict
    assert " times as much" in replace(measured, comprehensiveness=max(drawn, 0) + 0.1).verdict


def test_the_verdict_of_a_swap_says_whether_the_loss_rises_or_falls() -> None:
    assert (
        UniformSwap(((0.3,),), (0.3,), 0.3).verdict == "With uniform attention the loss rises by 0.30 nats per token."
    )
    lower = UniformSwap(((-0.3, 0.0),), (-0.3,), -0.3).verdict
    assert lower == "With uniform attention the loss falls by 0.30 nats per token; 1 of 2 heads matter by themselves."
