"""Marian, BART, mBART and Pegasus compared with the transformers library."""

from __future__ import annotations

import pytest
from huggingface_fixtures import (
    SEARCHES,
    check_decoding_restores_text,
    check_generation,
    check_logits_and_cross_attention,
    check_outputs_vary,
    check_round_trip,
)

VARIANTS = {
    "marian": ("marian", {}),
    "marian relu": ("marian", {"activation_function": "relu", "scale_embedding": False, "encoder_layers": 3}),
    "bart": ("bart", {}),
    "bart scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("mbart", {}),
    "pegasus": ("pegasus", {}),
}
FAMILIES = ["marian", "bart", "mbart", "pegasus"]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_cross_attention_equal_transformers(name, tmp_path):
    family, changes = VARIANTS[name]
    check_logits_and_cross_attention(family, tmp_path, **changes)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_transformers_token_for_token(family, search, tmp_path):
    check_generation(family, tmp_path, search)


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_compared_outputs_have_different_lengths(family, tmp_path):
    check_outputs_vary(family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_export_import_gives_the_same_bits(family, tmp_path):
    check_round_trip(family, tmp_path)


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_decoding_restores_text(family, tmp_path):
    check_decoding_restores_text(family, tmp_path)
