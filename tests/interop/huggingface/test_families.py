"""Laws of all Hugging Face families: equal probabilities, equal outputs, equal weights after export and import."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from family_cases import CASES, SEARCHES, built, logit_difference, outputs
from huggingface_fixtures import TEXTS, make, make_encoder, make_vit, record
from media_cases import MEDIA_CASES, built_media

from transduce.interop import FAMILIES, read
from transduce.interop.export import export

EVERY = {**CASES, **MEDIA_CASES}
SETTINGS = [(name, number) for name, case in EVERY.items() for number in range(len(case.settings))]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_probabilities_equal_transformers(name, setting):
    if name in MEDIA_CASES:
        difference = built_media(name, setting).logit_difference()
    else:
        difference = logit_difference(built(name, setting))
    record(name, EVERY[name].architecture, logits=difference)
    assert difference < 1e-4


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_transformers(name, search):
    expected, found = outputs(built(name), search)
    record(name, CASES[name].architecture, searches={search: (found, expected)})
    assert found == expected
    assert len(set(map(tuple, expected))) > 1  # the sources matter


@pytest.mark.parametrize(
    ("name", "search"), [(case.name, search) for case in MEDIA_CASES.values() for search in case.searches]
)
def test_outputs_of_media_equal_transformers(name, search):
    expected, found = built_media(name).outputs(search)
    record(name, MEDIA_CASES[name].architecture, searches={search: (found, expected)})
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


def make_family(architecture: str, folder: Path) -> Path:
    """A folder with a random model of the library."""
    cases = [name for name, case in CASES.items() if case.architecture == architecture]
    if cases:
        return built(cases[0]).folder
    kind, shape = re.fullmatch(r"(\w+?)(Model|MTModel|LMHeadModel|For\w+)", architecture).groups()
    if kind in ("Bert", "Roberta", "DistilBert"):
        make_encoder(kind.lower(), folder, shape)
    elif shape == "ForImageClassification":
        make_vit(folder, kind.lower())
    else:
        make(kind.lower(), folder)
    return folder


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.to_config is not None])
def test_exports_load_whole_in_transformers(architecture, tmp_path):
    """The library finds every weight that it needs, and needs every weight that it finds: nothing is initialised."""
    export(make_family(architecture, tmp_path / "given"), tmp_path / "back", "huggingface")
    (written,) = json.loads((tmp_path / "back" / "config.json").read_text())["architectures"]
    known = getattr(pytest.importorskip("transformers"), written)
    _, report = known.from_pretrained(tmp_path / "back", local_files_only=True, output_loading_info=True)
    assert {kind: sorted(keys) for kind, keys in report.items() if keys} == {}


def test_record_of_the_documentation_holds_what_is_claimed():
    """docs/interop.md is written from this record (`make families`)."""
    rows = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "families.json").read_text())
    assert EVERY.keys() <= rows.keys()
    for name, row in rows.items():
        assert row["architecture"] in FAMILIES, name
        assert row["logits"] < 1e-4, name
        assert all(row[search][0] == row[search][1] > 0 for search in SEARCHES if search in row), name
