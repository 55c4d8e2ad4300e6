"""Laws of all Hugging Face families: equal probabilities, equal outputs, equal weights after export and import."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from family_cases import CASES, SEARCHES, built, logit_difference, outputs
from huggingface_fixtures import TEXTS, make, make_encoder, make_vit, record
from media_cases import MEDIA_CASES, built_media
from vision_decoder_fixtures import make_vision_decoder
from whisper_fixtures import make_whisper

from transduce.errors import InputError
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
    written, own = architecture_of(tmp_path / "back"), CASES[name].architecture
    assert written == (CASES[name].exported_as or written)
    record(name, own, export=True if written == own else written)


def architecture_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exported])
def test_exports_have_the_same_probabilities_in_transformers(name, tmp_path):
    """Of every setting, as the library computes them before and after."""
    for setting in range(len(CASES[name].settings)):
        one, folder = built(name, setting), tmp_path / str(setting)
        export(one.folder, folder, "huggingface")
        known = getattr(pytest.importorskip("transformers"), architecture_of(folder))
        again = known.from_pretrained(folder, local_files_only=True).eval()
        inputs = {"input_ids": torch.tensor([[5, 9, 7, 12], [20, 11, 4, 8]]), "use_cache": False}
        if one.model.recipe.model.encoder is not None:
            inputs["decoder_input_ids"] = torch.tensor([[9, 10, 11], [4, 15, 6]])
        with torch.no_grad():
            expected, found = one.library(**inputs).logits, again(**inputs).logits
        words = slice(4, 22)  # special tokens that are never output have no probability in an export
        assert (found[..., words] - expected[..., words]).abs().max() < 1e-4


@pytest.mark.parametrize("name", MEDIA_CASES)
def test_media_that_equal_no_exported_architecture_are_refused(name, tmp_path):
    with pytest.raises(InputError, match="no Hugging Face architecture fits this model"):
        export(built_media(name).folder, tmp_path / "back", "huggingface")
    assert not (tmp_path / "back").exists()
    record(name, MEDIA_CASES[name].architecture, export=False)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Pix2Struct", {"is_vqa": True}, "is_vqa: True draws a question onto the image"),
        ("GIT", {"num_image_with_embedding": 6}, "num_image_with_embedding: 6 cannot be imported"),
        ("GIT", {"vision_config": None}, "config.json has no vision_config"),
        ("Donut", {"encoder": {"use_absolute_embeddings": True}}, "use_absolute_embeddings: True cannot be imported"),
        ("Donut", {"encoder": {"patch_size": [2, 4]}}, "is not square"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused_by_name(name, changes, message, tmp_path):
    shutil.copytree(built_media(name).folder, tmp_path / "given")
    content = json.loads((tmp_path / "given" / "config.json").read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    (tmp_path / "given" / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path / "given")


def make_family(architecture: str, folder: Path) -> Path:
    """A folder with a random model of the library."""
    cases = [name for name, case in CASES.items() if case.architecture == architecture]
    if cases:
        return built(cases[0]).folder
    others = {"VisionEncoderDecoderModel": make_vision_decoder, "WhisperForConditionalGeneration": make_whisper}
    if architecture in others:
        others[architecture](folder)
        return folder
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
    known = getattr(pytest.importorskip("transformers"), architecture_of(tmp_path / "back"))
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
