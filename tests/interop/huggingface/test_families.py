"""Laws of all Hugging Face families: equal probabilities, equal outputs, equal weights after export and import."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES, SEARCHES, built, logit_difference, outputs
from huggingface_fixtures import TEXTS, record

from transduce.interop import read
from transduce.interop.export import export

SETTINGS = [(name, number) for name, case in CASES.items() for number in range(len(case.settings))]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_probabilities_equal_transformers(name, setting):
    difference = logit_difference(built(name, setting))
    record(name, CASES[name].architecture, logits=difference, settings=len(CASES[name].settings))
    assert difference < 1e-4


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_transformers(name, search):
    expected, found = outputs(built(name), search)
    record(name, CASES[name].architecture, **{search: sum(map(list.__eq__, found, expected)) / len(expected)})
    assert found == expected
    assert len(set(map(tuple, expected))) > 1  # the sources matter


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exported])
def test_import_export_import_gives_the_same_bits(name, tmp_path):
    first = read(built(name).folder)
    export(built(name).folder, tmp_path / "back", "huggingface")
    second = read(tmp_path / "back")
    assert first.recipe.model == second.recipe.model
    assert first.tokenizers[0].encode_sources(TEXTS) == second.tokenizers[0].encode_sources(TEXTS)
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(tensor, second.weights[key]) for key, tensor in first.weights.items())
    record(name, CASES[name].architecture, export=True)
