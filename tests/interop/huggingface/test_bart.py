"""Marian, BART, mBART, Pegasus and FSMT compared with the transformers library."""

from __future__ import annotations

import pytest
import torch
from family_cases import FSMT_SIZES, Built, logit_difference
from huggingface_fixtures import (
    SEARCHES,
    check_decoding_restores_text,
    check_generation,
    check_logits_and_cross_attention,
    check_outputs_vary,
    check_round_trip,
    shake,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file

import transduce

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


def test_fsmt_file_without_position_tables_has_sinusoids(tmp_path):
    """As the published files; version 5 of the library writes the tables."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(3)
    made = shake(library.FSMTForConditionalGeneration(library.FSMTConfig(**FSMT_SIZES)))
    for side in (made.model.encoder, made.model.decoder):
        table = side.embed_positions
        table.make_weight(*table.weight.shape, table.padding_idx)
    made.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "fsmt")
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "embed_positions" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    model = transduce.load(tmp_path, device="cpu")
    assert model.recipe.model.encoder["position"]["kind"] == "sinusoidal"
    assert logit_difference(Built(tmp_path, made, model)) < 1e-4
