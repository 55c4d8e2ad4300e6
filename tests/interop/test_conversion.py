"""Conversion to runs, and downloads from the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import json
import random
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from huggingface_fixtures import WORDS, change_config, make
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.interop import FAMILIES, exported_as, locate
from transduce.run import Run


@pytest.mark.parametrize("family", ["marian", "bart", "t5", "gpt2", "bert"])
def test_converted_run_equals_loaded_folder(family, tmp_path):
    make(family, tmp_path / "given")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "given"), str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(tmp_path / "run")
    direct, run = transduce.load(tmp_path / "given", device="cpu"), transduce.load(tmp_path / "run", device="cpu")
    assert direct.recipe == run.recipe
    assert direct.source.fingerprint == run.source.fingerprint
    native = run.network.state_dict()
    assert all(torch.equal(tensor, native[name]) for name, tensor in direct.network.state_dict().items())


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_imported_model_generates_scores_and_explains(family, tmp_path):
    make(family, tmp_path, generation={"num_beams": 3, "max_length": 12})
    model = transduce.load(tmp_path, device="cpu")
    one = model.generate(["w1 w2 w3"])[0]
    scores = model.score([("w1 w2 w3", "w4 w5")])[0]
    assert len(scores.tokens) == 3 + len(model.target.prefix)
    assert one.explanation is not None
    packed = transduce.load(tmp_path, device="cpu", precision="fp32").generate(["w1 w2 w3"])[0]
    assert packed.text == one.text


@pytest.mark.parametrize("converted", [True, False])
def test_imported_model_is_trained_further(tmp_path, monkeypatch, converted):
    """A random model learns to copy its source from imported weights: the loss falls. It need not be converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    make("bart", tmp_path / "given")
    run = CliRunner().invoke(app, ["convert", str(tmp_path / "given"), str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS[:6], k=draw.randint(1, 3))) for _ in range(400)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    settings = [
        f"init.model={tmp_path / ('run' if converted else 'given')}",
        f"data.cache={tmp_path / 'cache'}",
        f"training.steps={120 if converted else 40}",
        "training.batch_tokens=400",
        "training.validate_every=30",
        "training.optimiser.learning_rate=0.003",
        "training.device=cpu",
    ]
    again = CliRunner().invoke(
        app, ["train", str(tmp_path / "pairs.tsv"), *settings, "--run", str(tmp_path / "tuned"), "-q"]
    )
    assert again.exit_code == 0, again.output
    tuned, given = Run(tmp_path / "tuned"), Run(tmp_path / "run")
    assert tuned.tokenizers()[0].fingerprint == given.tokenizers()[0].fingerprint
    assert tuned.recipe().model == given.recipe().model
    assert tuned.recipe().generation == given.recipe().generation
    assert len(list((tmp_path / "kept").rglob("recipe.yaml"))) == (0 if converted else 1)
    if not converted:
        return
    losses = [entry["loss"] for entry in read_log(tuned) if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0], losses


def read_log(run: Run) -> list[dict]:
    return [json.loads(line) for line in run.log.read_text().splitlines()]


NAME = "somebody/opus-mt-xx-yy"


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """An empty working folder and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def fake_hub(monkeypatch, given: Path | None, problem: Exception | None = None) -> list[str]:
    """A hub with one model, or with none."""
    requested: list[str] = []

    def snapshot_download(name, *, local_dir, allow_patterns, ignore_patterns=()):
        requested.append(name)
        if problem is not None:
            (Path(local_dir) / "config.json").write_text("{}")  # as far as it came
            raise problem
        for path in sorted(given.rglob("*")):
            inner = str(path.relative_to(given))
            expected = any(fnmatch.fnmatch(inner, one) for one in allow_patterns)
            if path.is_file() and expected and not any(fnmatch.fnmatch(inner, one) for one in ignore_patterns):
                (Path(local_dir) / inner).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, Path(local_dir) / inner)

    library = types.ModuleType("huggingface_hub")
    library.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return requested


def test_hub_model_is_downloaded_once_without_code(working_folder, monkeypatch):
    make("marian", working_folder / "given")
    for name in ("pytorch_model.bin", "own.py", "onnx/model.safetensors", "onnx/config.json"):
        (working_folder / "given" / name).parent.mkdir(exist_ok=True)
        (working_folder / "given" / name).write_text("anything")
    requested = fake_hub(monkeypatch, working_folder / "given")
    (working_folder / "here" / "lines.txt").write_text("w1 w2\nw3\n")
    result = CliRunner().invoke(app, ["generate", NAME, "lines.txt", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    expected = transduce.load(working_folder / "given", device="cpu").generate(["w1 w2", "w3"])
    assert result.output.splitlines()[:2] == [one.text for one in expected]
    assert CliRunner().invoke(app, ["convert", NAME, str(working_folder / "run")]).exit_code == 0
    assert requested == [NAME]
    kept = {
        path.name for path in (working_folder / "cache" / "transduce" / "hub" / "somebody--opus-mt-xx-yy").iterdir()
    }
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= kept
    assert not kept & {"pytorch_model.bin", "own.py", "onnx"}


def test_missing_huggingface_hub_is_reported(working_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="needs huggingface_hub") as caught:
        transduce.load(NAME)
    assert "config.json, model.safetensors" in caught.value.remedy


def test_interrupted_download_is_not_taken_for_a_model(working_folder, monkeypatch):
    """What came before it broke off is not taken for the model the next time."""
    requested = fake_hub(monkeypatch, None, OSError("no route\nand much more"))
    for _ in range(2):
        with pytest.raises(InputError, match="could not be downloaded: no route") as caught:
            transduce.load(NAME)
        assert "config.json, model.safetensors" in caught.value.remedy
        assert "much more" not in str(caught.value)
    assert requested == [NAME, NAME]


@pytest.mark.parametrize("name", ["runs/demo", "here/demo", "one", "a/b/c", "/a/b", "../a", "a/../b", "a b/c", "-a/b"])
def test_paths_are_never_looked_up_on_the_hub(name, working_folder, monkeypatch):
    """Run folders, misspelt folders, and anything that cannot be a hub name."""
    requested = fake_hub(monkeypatch, None, OSError("requested"))
    (working_folder / "here" / "here").mkdir()
    assert locate(name) == Path(name)
    assert requested == []


USER_FAMILY = """
from transduce.interop.huggingface import bart
from transduce.contracts import Family

class MyMarian(Family):
    def __init__(self):
        marian = bart.FAMILIES["MarianMTModel"]
        super().__init__(marian.to_recipe, marian.weights)
"""


def test_convert_command_takes_a_family_from_a_file_of_the_user(working_folder):
    make("marian", working_folder / "given")
    change_config(working_folder / "given", architectures=["MyMarianModel"])
    (working_folder / "here" / "families.py").write_text(USER_FAMILY)
    refused = CliRunner().invoke(app, ["convert", str(working_folder / "given"), str(working_folder / "run")])
    assert refused.exit_code != 0
    words = ["convert", str(working_folder / "given"), str(working_folder / "run"), "--family", "families:MyMarian"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    change_config(working_folder / "given", architectures=["MarianMTModel"])
    converted, known = (transduce.load(working_folder / name, device="cpu") for name in ("run", "given"))
    weights = known.network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in converted.network.state_dict().items())


def test_list_shows_every_family_and_what_its_export_is():
    result = CliRunner().invoke(app, ["convert", "--list"])
    assert result.exit_code == 0, result.output
    rows = [line.split("\t") for line in result.output.splitlines()]
    assert [row[0] for row in rows[1 : 1 + len(FAMILIES)]] == list(FAMILIES)
    for row in (
        ["WhisperForConditionalGeneration", "encoder-decoder", "audio", "yes"],
        ["Pix2StructForConditionalGeneration", "encoder-decoder", "image", "no"],
        ["PLBartForConditionalGeneration", "encoder-decoder", "text", "as BartForConditionalGeneration"],
        ["Marian checkpoint", "encoder-decoder", "text", "where an architecture fits"],
        ["CTranslate2 WhisperSpec", "encoder-decoder", "audio", "as WhisperForConditionalGeneration"],
    ):
        assert row in rows


def test_listed_exports_are_those_that_were_measured():
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "families.json"
    rows = [row for row in json.loads(record.read_text()).values() if "export" in row]
    # Of image-to-text models one decoder is written, and the list knows the architecture alone.
    rows = [row for row in rows if row["architecture"] != "VisionEncoderDecoderModel"]
    assert len(rows) > 20
    for row in rows:
        name, written = row["architecture"], row["export"]
        assert exported_as(name) == (written if isinstance(written, str) else name if written else ""), name
