"""Claims that need no training: what they state holds exactly."""

from __future__ import annotations

import pytest
import torch

from transduce.attention.positions import POSITIONS
from transduce.decoders import DECODERS
from transduce.evaluation.claims import complexity, self_attention, training
from transduce.evaluation.claims.claim import Budget, fitted_exponent, power_law, random_batch, untrained
from transduce.objectives import CrossEntropy
from transduce.objectives.language_modelling import TruncatedBPTT


def test_an_exponent_is_recovered_from_a_power_law() -> None:
    assert power_law([1, 2, 4, 8], [3 * size**1.7 for size in (1, 2, 4, 8)]) == pytest.approx((3, 1.7))


@pytest.mark.parametrize("position", POSITIONS)
def test_a_shuffled_source_gives_a_shuffled_memory_without_positions_only(position: str) -> None:
    error = self_attention.shuffle_error(position, 3)
    assert error <= self_attention.EXACT if position == "none" else error > 1e-3


def test_relevance_is_symmetric_without_separate_projections_only() -> None:
    assert self_attention.asymmetry(self_attention.relevance("none", 2)) == 0
    assert self_attention.asymmetry(self_attention.relevance("all", 2, tied=True)) <= self_attention.EXACT
    assert self_attention.asymmetry(self_attention.relevance("all", 2)) > 0.5


def test_order_and_asymmetry_hold(tmp_path) -> None:
    for measured in (
        self_attention.measure_order(Budget(tmp_path)),
        self_attention.measure_asymmetry(Budget(tmp_path)),
    ):
        assert measured.holds
        assert measured.checks


@pytest.mark.parametrize("name", self_attention.models())
def test_only_without_the_mask_an_emitted_output_changes(name: str) -> None:
    model = untrained(self_attention.models()[name], 1).double()
    changes = self_attention.changes(model, random_batch(2, 6, 6, 1))
    assert len(changes) == 6
    assert max(changes) <= self_attention.EXACT if name in DECODERS else min(changes) > 1e-4


@pytest.mark.parametrize("name", complexity.KINDS)
def test_counted_operations_parameters_and_steps_are_those_of_the_formula(name: str) -> None:
    kind = complexity.KINDS[name]
    layer = kind.make(16)
    assert sum(parameter.numel() for parameter in layer.parameters()) == kind.parameters(16)
    assert complexity.operations(layer, 24, 16) == kind.operations(24, 16)
    assert complexity.sequential_steps(layer, 24, 16) == kind.steps(24)
    if kind.exponents[0] is not None:
        lengths = (32, 64, 128) if kind.memory[0] == 1 else (256, 512, 1024)
        fitted = fitted_exponent(lengths, [complexity.saved_bytes(layer, length, 16) for length in lengths])
        assert abs(fitted - kind.memory[0]) < complexity.TOLERANCE
        widths = (8, 16, 32)
        fitted = fitted_exponent(widths, [complexity.saved_bytes(kind.make(width), 256, width) for width in widths])
        assert abs(fitted - kind.memory[1]) < complexity.TOLERANCE


def test_self_attention_costs_as_much_as_recurrence_where_the_curves_cross() -> None:
    lengths = (16, 32, 64)
    curves = {"recurrent": [10.0 * t for t in lengths], "self-attention, no projections": [t * t for t in lengths]}
    assert complexity.crossover(lengths, curves) == pytest.approx(10)  # type: ignore[arg-type]


def test_the_complexity_of_layers_is_that_of_the_formula_in_length_and_in_width(tmp_path) -> None:
    measured = complexity.measure_complexity(Budget(tmp_path))
    assert measured.holds
    assert len(measured.panels) == 6
    (row,) = [row for row in measured.tables[-1].rows if row[0] == "operations"]
    assert row[1] == pytest.approx(complexity.WIDTH)


def test_fused_attention_does_not_store_its_weights() -> None:
    fused, stored = complexity.AttentionLayer(16, "all", stored=False), complexity.AttentionLayer(16, "all")
    stored.load_state_dict(fused.state_dict())
    assert complexity.saved_bytes(stored, 256, 16) > 2 * complexity.saved_bytes(fused, 256, 16)
    values = torch.randn(1, 20, 16)
    torch.testing.assert_close(fused(values), stored(values))


@pytest.mark.parametrize(("name", "expected"), [("recurrent", 10), (complexity.DILATED, 3), ("self-attention", 1)])
def test_path_lengths(name: str, expected: int) -> None:
    assert complexity.path_length(name, 10) == expected


def test_the_gradient_vanishes_in_a_plain_recurrent_network_and_not_in_a_transformer() -> None:
    batch = random_batch(4, training.LENGTH, 1, 5)
    far = {
        name: training.by_distance(training.source_gradients(untrained(spec, 5), batch))[training.FAR - 1]
        for name, spec in training.models().items()
    }
    assert far["plain RNN"] < 1e-6 * far["Transformer"]
    assert far["LSTM"] < 0.01 * far["Transformer"]
    assert far["GRU with attention"] > 0.05 * far["Transformer"]


def test_truncated_back_propagation_cuts_the_gradient_exactly() -> None:
    whole = training.truncated_gradients(CrossEntropy(), 2)
    cut = training.truncated_gradients(TruncatedBPTT(window=training.WINDOW), 2)
    begin = training.LENGTH // training.WINDOW * training.WINDOW
    assert (whole > 0).all()
    assert (cut[:begin] == 0).all()
    assert (cut[begin:] > 0).all()
