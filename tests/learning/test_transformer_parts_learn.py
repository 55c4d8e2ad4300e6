"""What stands in for self-attention learns: convolutions, the simpler simple recurrent unit, averages."""

from __future__ import annotations

import pytest
from learning_fixtures import TRANSFORMER, learn

pytestmark = pytest.mark.slow

CONVOLUTIONAL = {"kind": "convolutional", "width": 48, "layers": 3, "dropout": 0.0}

# name: encoder, decoder, updates, batches sorted together, exact match to reach (%; a guess reaches 0.1)
PARTS = {
    "convolutional": (CONVOLUTIONAL, CONVOLUTIONAL, 80, 100, 60),
    "SSRU decoder": (TRANSFORMER, {**TRANSFORMER, "token_mixer": "ssru"}, 110, 100, 45),
    "average decoder": (TRANSFORMER, {**TRANSFORMER, "token_mixer": "average"}, 120, 100, 45),
    "grouped, windowed, RMS, gated": (
        {**TRANSFORMER, "kv_heads": 2, "norm_kind": "rms", "gated": True, "activation": "silu", "bias": False},
        {**TRANSFORMER, "kv_heads": 1, "norm_kind": "rms", "gated": True, "window": 3, "position": "rotary"},
        110,
        100,
        45,
    ),
    # Its statistics need batches that are alike: none sorted by length.
    "batch norm": ({**TRANSFORMER, "norm_kind": "batch"}, {**TRANSFORMER, "norm_kind": "batch"}, 120, 1, 45),
}


@pytest.mark.parametrize("part", PARTS)
def test_part_learns(part, tmp_path):
    encoder, decoder, steps, pool, exact = PARTS[part]
    trained, _ = learn(encoder, decoder, steps, tmp_path, pool=pool)
    assert trained.scores["test"].scores["exact"].value >= exact
