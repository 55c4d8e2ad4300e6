"""Replacements of self-attention learn: convolutions, SSRU, average attention."""

from __future__ import annotations

import pytest
from learning_fixtures import TRANSFORMER, learn

pytestmark = pytest.mark.slow

CONVOLUTIONAL = {"kind": "convolutional", "width": 64, "layers": 3, "dropout": 0.0}

# name: encoder, decoder, updates, batches sorted together, exact match to reach (%)
PARTS = {
    "convolutional": (CONVOLUTIONAL, CONVOLUTIONAL, 180, 100, 95),
    "SSRU decoder": (TRANSFORMER, {**TRANSFORMER, "token_mixer": "ssru"}, 180, 100, 95),
    "average decoder": (TRANSFORMER, {**TRANSFORMER, "token_mixer": "average"}, 220, 100, 95),
    "grouped, windowed, RMS, gated": (
        {**TRANSFORMER, "kv_heads": 2, "norm_kind": "rms", "gated": True, "activation": "silu", "bias": False},
        {**TRANSFORMER, "kv_heads": 1, "norm_kind": "rms", "gated": True, "window": 3, "position": "rotary"},
        180,
        100,
        95,
    ),
    # Its statistics need batches that are alike: none sorted by length.
    "batch norm": ({**TRANSFORMER, "norm_kind": "batch"}, {**TRANSFORMER, "norm_kind": "batch"}, 220, 1, 95),
}


@pytest.mark.parametrize("part", PARTS)
def test_part_learns(part, tmp_path):
    encoder, decoder, steps, pool, exact = PARTS[part]
    trained, _ = learn("reverse", encoder, decoder, steps, tmp_path, pool=pool)
    assert trained.scores["test"].scores["exact"].value >= exact
