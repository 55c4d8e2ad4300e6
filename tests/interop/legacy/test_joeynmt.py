"""JoeyNMT checkpoints: logits equal to torch.nn layers or to the equations."""

from __future__ import annotations

import pytest
import torch
from legacy_fixtures import (
    DECODER_IDS,
    WORDS,
    Reference,
    compare,
    numbers,
    randomised,
    read,
    save_joeynmt,
)
from legacy_recurrent_fixtures import Translator, save_joeynmt_cells

import transduce


@pytest.mark.parametrize("before", [False, True])
def test_transformer_equals_torch_layers(before, tmp_path):
    reference = randomised(Reference(len(WORDS) + 4, len(WORDS) + 1, before=before))
    save_joeynmt(tmp_path, reference, before=before)
    model = transduce.load(tmp_path, device="cpu")
    source, foreign = read(model)
    with torch.no_grad():
        compare(model, source, reference(foreign, source.mask, numbers(model.target, DECODER_IDS)))
    assert model.recipe.generation.beam == 4


@pytest.mark.parametrize(("cell", "layers", "score"), [("gru", 1, "mlp"), ("lstm", 2, "mlp"), ("gru", 2, "bilinear")])
def test_recurrent_model_equals_the_equations(cell, layers, score, tmp_path):
    reference = randomised(Translator(cell, layers, score, bridge=True))
    save_joeynmt_cells(tmp_path, reference)
    model = transduce.load(tmp_path, device="cpu")
    source, foreign = read(model)
    with torch.no_grad():
        compare(model, source, reference(foreign, source.mask, numbers(model.target, DECODER_IDS)))
