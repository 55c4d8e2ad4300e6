"""Model cards of all export formats, and the search that they state."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from export_fixtures import TEXTS, make_run, pair

import transduce
from transduce.interop.export import export
from transduce.run import Run

BART = {
    "norm": "post",
    "embedding_norm": True,
    "position": {"kind": "learned", "max_positions": 40},
    "activation": "gelu",
}
NEEDED = {"huggingface": "transformers", "onnx": "onnxscript", "ctranslate2": "ctranslate2"}


def exported_card(run: Run, to: str, out: Path) -> str:
    pytest.importorskip(NEEDED.get(to, "torch"))
    export(run.folder, out, to)
    if to != "bundle":
        return (out / "README.md").read_text()
    with zipfile.ZipFile(out) as archive:
        return archive.read("README.md").decode()


def run_with(folder: Path, **generation: Any) -> Run:
    return make_run(folder, pair(**BART), generation={"max_length": 12, **generation})


@pytest.mark.parametrize("to", ["huggingface", "onnx", "ctranslate2", "bundle"])
def test_every_format_has_a_card_with_sizes_and_search(to, tmp_path):
    run = run_with(tmp_path / "run", strategy="beam", beam=3)
    card = exported_card(run, to, tmp_path / "out")
    assert card.startswith("---\nlibrary_name: ")
    assert f"| parameters | {transduce.load(run.folder, device='cpu').parameters:,} |" in card
    assert "`strategy: beam`, `beam: 3`" in card
    told = {"ctranslate2": "holds no search", "bundle": "the default of the bundle"}
    assert told.get(to, "outputs can differ") in card


def test_bundle_with_a_card_is_the_same_model(tmp_path):
    run = run_with(tmp_path / "run", strategy="greedy")
    export(run.folder, tmp_path / "model.zip", "bundle")
    models = [transduce.load(path, device="cpu") for path in (run.folder, tmp_path / "model.zip")]
    first, second = ([one.text for one in model.generate(TEXTS)] for model in models)
    assert first == second


@pytest.mark.parametrize(
    "search",
    [
        {"strategy": "greedy"},
        *({"strategy": "huggingface_beam", "beam": 3, "stop": stop} for stop in ("length", "full", "bound")),
        {"strategy": "huggingface_beam", "beam": 4, "length_penalty": 0.6, "min_length": 3},
        {"strategy": "huggingface_beam", "beam": 4, "no_repeat_ngram": 2},
    ],
)
def test_search_that_is_said_to_be_the_same_gives_the_same_outputs_in_transformers(search, tmp_path):
    """`generate` of the library without any argument, with generation_config.json as it was written."""
    library = pytest.importorskip("transformers")
    run = run_with(tmp_path / "run", **search)
    assert "states the same search" in exported_card(run, "huggingface", tmp_path / "out")
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / "out")
    given = tokenizer(TEXTS, return_tensors="pt", padding=True)
    model = library.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    rows = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    # The library puts a space between any two pieces of a vocabulary of words.
    found = [" ".join(text.split()) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
    expected = [" ".join(one.text.split()) for one in transduce.load(run.folder, device="cpu").generate(TEXTS)]
    assert found == expected
    assert len(set(expected)) > 1
