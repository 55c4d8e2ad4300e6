"""Runs quantised to int8: size, outputs equal to the packed network, round trips, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import RECURRENT, Command, settings
from torch import nn

import transduce
from transduce.errors import InputError
from transduce.inference.quantisation import quantise, rounded_weights, whole_weights
from transduce.kernels.linear import quantise_rows
from transduce.run import Run
from transduce.training.experiment import train

BLOCKS = {"kind": "transformer", "width": 32, "layers": 1, "heads": 2, "ff_width": 64}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"encoder": BLOCKS, "decoder": BLOCKS, "tie": "target"},
    "recurrent": {"encoder": {**RECURRENT, "width": 32}, "decoder": {**RECURRENT, "width": 32, "context": "luong"}},
}
TEXTS = ["red blue", "green", "white black red"]


@pytest.fixture(scope="module", params=MODELS)
def runs(request: pytest.FixtureRequest, bench: Path, pairs: Path) -> tuple[Path, Path]:
    plain, small = bench / f"whole-{request.param}", bench / f"eight-{request.param}"
    train(settings(pairs, MODELS[request.param], "words", steps=60, validate_every=60), plain)
    quantise(plain, small, transduce.load(plain).network)
    return plain, small


def weights_file(run: Path) -> Path:
    return run / "checkpoints" / "final" / "weights.safetensors"


def test_a_quarter_of_the_size(runs: tuple[Path, Path]) -> None:
    plain, small = runs
    stored = Run(small).checkpoints.for_inference()
    assert stored is not None
    network = transduce.load(plain).network
    matrices = [name for name, tensor in network.state_dict().items() if tensor.dim() == 2]
    assert matrices
    assert {stored.weights[name].dtype for name in matrices} == {torch.int8}
    assert weights_file(small).stat().st_size < 0.45 * weights_file(plain).stat().st_size


def test_outputs_equal_those_of_the_packed_network(runs: tuple[Path, Path]) -> None:
    plain, small = (transduce.load(run, precision="int8") for run in runs)
    pairs = [(text, text.upper()) for text in TEXTS]
    for one, other in zip(plain.score(pairs), small.score(pairs), strict=True):
        assert other.token_scores == pytest.approx(one.token_scores, abs=0.15)
    opened = transduce.load(runs[1], precision="auto")
    assert [one.text for one in opened.generate(TEXTS)] == [one.text for one in small.generate(TEXTS)]
    assert any("Int8" in type(part).__name__ for part in opened.network.modules())


def test_rounding_twice_changes_nothing(runs: tuple[Path, Path]) -> None:
    stored = Run(runs[1]).checkpoints.for_inference()
    assert stored is not None
    again = rounded_weights(transduce.load(runs[1]).network)
    assert again.keys() == stored.weights.keys()
    for name, tensor in again.items():
        assert torch.allclose(tensor.float(), stored.weights[name].float(), rtol=1e-6, atol=0), name


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.floats(1e-6, 1e6))
def test_no_weight_moves_by_more_than_half_a_step(seed: int, rows: int, columns: int, size: float) -> None:
    layer = nn.Linear(columns, rows)
    layer.weight.data = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    moved = (whole_weights(rounded_weights(layer))["weight"] - layer.weight.detach()).abs()
    assert bool((moved <= 0.5001 * quantise_rows(layer.weight).scales[:, None]).all())


def test_a_quantised_run_cannot_be_trained(runs: tuple[Path, Path], pairs: Path, tmp_path: Path) -> None:
    content = settings(pairs, MODELS["tied"], "words")
    with pytest.raises(InputError, match="cannot be trained"):
        train({**content, "init": {"model": str(runs[1])}}, tmp_path / "new")
    with pytest.raises(InputError, match="cannot be trained"):
        train(content, runs[1], resume=True)
    with pytest.raises(InputError, match="already quantised"):
        quantise(runs[1], tmp_path / "twice", transduce.load(runs[1]).network)
    with pytest.raises(InputError, match="already a run here"):
        quantise(runs[0], runs[1], transduce.load(runs[0]).network)


def test_quantise_command(runs: tuple[Path, Path], command: Command, tmp_path: Path) -> None:
    assert command("quantise", runs[0], tmp_path / "small").code == 0
    assert Run(tmp_path / "small").recipe().model.weight_dtype == "int8"
