"""Names of the hub: fetched once, only files that hold no code, and told in words where that cannot be."""

from __future__ import annotations

import fnmatch
import shutil
import sys
import types
from pathlib import Path

import pytest
from interop_fixtures import make
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.interop import locate

NAME = "somebody/opus-mt-xx-yy"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def pretend(monkeypatch, given: Path | None, problem: Exception | None = None) -> list[str]:
    """A hub with one model, or with none."""
    asked: list[str] = []

    def snapshot_download(name, *, local_dir, allow_patterns, ignore_patterns):
        asked.append(name)
        if problem is not None:
            (Path(local_dir) / "config.json").write_text("{}")  # as far as it came
            raise problem
        for path in sorted(given.rglob("*")):
            inner = str(path.relative_to(given))
            wanted = any(fnmatch.fnmatch(inner, one) for one in allow_patterns)
            if path.is_file() and wanted and not any(fnmatch.fnmatch(inner, one) for one in ignore_patterns):
                (Path(local_dir) / inner).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, Path(local_dir) / inner)

    library = types.ModuleType("huggingface_hub")
    library.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return asked


def test_fetched_once_and_used(place, monkeypatch):
    make("marian", place / "given")
    for name in ("pytorch_model.bin", "own.py", "onnx/model.safetensors", "onnx/config.json"):
        (place / "given" / name).parent.mkdir(exist_ok=True)
        (place / "given" / name).write_text("anything")
    asked = pretend(monkeypatch, place / "given")
    (place / "here" / "lines.txt").write_text("w1 w2\nw3\n")
    result = CliRunner().invoke(app, ["generate", NAME, "lines.txt", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    wanted = transduce.load(place / "given", device="cpu").generate(["w1 w2", "w3"])
    assert result.output.splitlines()[:2] == [one.text for one in wanted]
    assert CliRunner().invoke(app, ["convert", NAME, str(place / "run")]).exit_code == 0
    assert asked == [NAME]
    kept = {path.name for path in (place / "cache" / "transduce" / "hub" / "somebody--opus-mt-xx-yy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= kept
    assert not kept & {"pytorch_model.bin", "own.py", "onnx"}


def test_without_the_package(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="needs huggingface_hub") as caught:
        transduce.load(NAME)
    assert "config.json, model.safetensors" in caught.value.remedy


def test_without_a_network(place, monkeypatch):
    """What came before it broke off is not taken for the model the next time."""
    asked = pretend(monkeypatch, None, OSError("no route\nand much more"))
    for _ in range(2):
        with pytest.raises(InputError, match="could not be downloaded: no route") as caught:
            transduce.load(NAME)
        assert "config.json, model.safetensors" in caught.value.remedy
        assert "much more" not in str(caught.value)
    assert asked == [NAME, NAME]


@pytest.mark.parametrize("name", ["runs/demo", "here/demo", "one", "a/b/c", "/a/b", "../a", "a/../b", "a b/c", "-a/b"])
def test_paths_are_never_asked_for(name, place, monkeypatch):
    """Folders of our own, folders that are misspelt, and whatever cannot be a name."""
    asked = pretend(monkeypatch, None, OSError("asked"))
    (place / "here" / "here").mkdir()
    assert locate(name) == Path(name)
    assert asked == []
