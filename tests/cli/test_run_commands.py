"""`transduce list` and `transduce push`: what is shown of a run, and what is uploaded; nothing uses the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import Command

import transduce


def test_list_shows_scores_updates_and_size(command: Command, attention_run: Path, tmp_path: Path) -> None:
    called = command("list", attention_run.parent, "--json")
    assert called.code == 0, called.err
    (found,) = [one for one in map(json.loads, called.out.splitlines()) if one["run"] == str(attention_run)]
    scores = json.loads((attention_run / "metrics.json").read_text())["dev"]["scores"]
    assert found["scores"] == {name: one["value"] for name, one in scores.items()}
    assert (found["updates"], found["finished"], found["model"]) == (200, True, "recurrent -> recurrent")
    assert found["bytes"] > 10_000
    assert str(attention_run) in command("list", attention_run).out
    assert "no runs" in command("list", tmp_path).out
    assert command("list", tmp_path / "none").code == 2


class Hub:
    """A Hub that records what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.files: dict[str, bytes] = {}

    def HfApi(self) -> Hub:  # noqa: N802
        return self

    def create_repo(self, name: str, **options: Any) -> None:
        self.calls.append((name, options))
        if name == "no/access":
            raise PermissionError("401 Unauthorized\nrequest id 7")

    def upload_folder(self, folder_path: str, repo_id: str, commit_message: str) -> str:
        self.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return f"https://hub.test/{repo_id}"


def test_push_uploads_an_export_with_a_card(
    command: Command, transformer_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    called = command("push", transformer_run, "me/colours", "--to", "bundle", "--licence", "mit", "--private")
    assert called.code == 0, called.err
    assert called.out == "https://hub.test/me/colours\n"
    assert hub.calls == [("me/colours", {"private": True, "exist_ok": True})]
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlicense: mit\nlibrary_name: transduce\n")
    for message in ("pairs.tsv, 400 pairs", "| dev | exact |", "## Limits", "kind: transformer"):
        assert message in card
    assert str(tmp_path.parent) not in card
    (tmp_path / "model.zip").write_bytes(hub.files["model.zip"])
    assert transduce.load(tmp_path / "model.zip").generate(["red"]) == transduce.load(transformer_run).generate(["red"])
    refused = command("push", transformer_run, "no/access", "--to", "bundle")
    assert (refused.code, refused.err.count("\n")) == (2, 2)
    assert "401 Unauthorized" in refused.err


def test_push_explains_what_is_wrong(command: Command, transformer_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "USER/NAME" in command("push", transformer_run, "a b").err
    assert "known: bundle, huggingface" in command("push", transformer_run, "me/x", "--to", "onnx").err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "transduce[hub]" in command("push", transformer_run, "me/x").err


def test_a_dry_run_writes_the_files_alone(command: Command, attention_run: Path, tmp_path: Path) -> None:
    called = command("push", attention_run, "me/x", "--to", "bundle", "--dry-run", tmp_path / "files")
    assert called.code == 0, called.err
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["README.md", "model.zip"]
