"""Bundles: equal to the run they hold, and refused where they are damaged or hostile."""

from __future__ import annotations

import json
import shutil
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from export_fixtures import TEXTS, make_run, pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError
from transduce.interop import bundle
from transduce.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("bundle") / "run", pair())


@pytest.fixture(scope="module")
def packed(run: Run) -> Path:
    return bundle.pack(run, run.folder.parent / "model.zip")


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_write_read_and_convert_a_bundle(run, tmp_path):
    place = tmp_path / "model.zip"
    assert invoke("export", run.folder, place, "--to", "bundle").strip() == str(place)
    first, second = transduce.load(run.folder, device="cpu"), transduce.load(place, device="cpu")
    assert first.recipe.model == second.recipe.model
    weights = second.network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in first.network.state_dict().items())
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS) + "\n")
    assert invoke("generate", place, tmp_path / "lines.txt") == invoke("generate", run.folder, tmp_path / "lines.txt")
    invoke("convert", place, tmp_path / "again")
    assert Run(tmp_path / "again").recipe_file.read_bytes() == run.recipe_file.read_bytes()
    assert [one.text for one in transduce.load(tmp_path / "again").generate(TEXTS)] == [
        one.text for one in first.generate(TEXTS)
    ]


def test_the_same_run_gives_the_same_bytes(run, packed, tmp_path):
    assert bundle.pack(run, tmp_path / "other.zip").read_bytes() == packed.read_bytes()


def test_no_temporary_files_remain(run, packed):
    assert {path.name for path in packed.parent.iterdir()} == {"run", "model.zip"}


def test_nothing_is_overwritten(run, packed, tmp_path):
    with pytest.raises(InputError, match="already"):
        bundle.pack(run, packed)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="already"):
        bundle.unpack(packed, tmp_path / "full")


def test_recipe_that_names_code_is_refused(run, packed, tmp_path):
    """Neither taken along nor asked for."""
    recipe = run.recipe_file.read_text().replace("kind: transformer", "kind: mine:Encoder", 1)
    rewrite(packed, tmp_path / "bad.zip", {"recipe.yaml": recipe.encode()})
    with pytest.raises(InputError, match="needs its own code"):
        transduce.load(tmp_path / "bad.zip", trust_user_code=True)


def rewrite(source: Path, target: Path, changes: dict[str, bytes | None], **options: Any) -> None:
    """The same zip with members changed, added or (None) left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        content = {name: old.read(name) for name in old.namelist()} | changes
        for name, written in content.items():
            if written is not None:
                new.writestr(name, written)


def refused(path: Path, tmp_path: Path) -> InputError:
    """Not read, and nothing of it left on the disk."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    with pytest.raises(InputError) as caught:
        bundle.unpack(path, place / "unpacked")
    assert not list(place.iterdir())
    with pytest.raises(InputError):
        transduce.load(path)
    return caught.value


@pytest.mark.parametrize(
    "name",
    ["../evil.txt", "/etc/evil", "..\\evil", "code.py", "recipe.yaml/", "./recipe.yaml", "checkpoints/../recipe.yaml"],
)
def test_unexpected_member_names_are_refused(name, packed, tmp_path):
    rewrite(packed, tmp_path / "bad.zip", {name: b"x", "metrics.json": None})
    assert "does not belong" in str(refused(tmp_path / "bad.zip", tmp_path))


@pytest.mark.parametrize("missing", [name for name in bundle.MEMBERS if name not in bundle.OPTIONAL])
def test_missing_member_is_refused(missing, packed, tmp_path):
    rewrite(packed, tmp_path / "bad.zip", {missing: None})
    assert missing in str(refused(tmp_path / "bad.zip", tmp_path))


def test_symbolic_link_is_refused(packed, tmp_path):
    rewrite(packed, tmp_path / "bad.zip", {"recipe.yaml": None})
    with zipfile.ZipFile(tmp_path / "bad.zip", "a") as archive:
        entry = zipfile.ZipInfo("recipe.yaml")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    assert "not a regular file" in str(refused(tmp_path / "bad.zip", tmp_path))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_member_is_refused(method, packed, tmp_path):
    rewrite(packed, tmp_path / "bad.zip", {"metrics.json": b" " * 10_000_000}, compression=method)
    assert "compressed" in str(refused(tmp_path / "bad.zip", tmp_path))


def test_repeated_member_is_refused(packed, tmp_path):
    (tmp_path / "bad.zip").write_bytes(packed.read_bytes())
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "bad.zip", "a") as archive,
    ):
        archive.writestr("recipe.yaml", "model: {}")
    assert "twice" in str(refused(tmp_path / "bad.zip", tmp_path))


def test_too_many_members_are_refused(packed, tmp_path):
    rewrite(packed, tmp_path / "bad.zip", {f"file{number}": b"" for number in range(50)})
    assert "members" in str(refused(tmp_path / "bad.zip", tmp_path))


def directory(content: bytes, name: str) -> int:
    """Where the record of a member begins in the list at the end."""
    at = content.rindex(name.encode()) - 46
    assert content[at : at + 4] == b"PK\x01\x02"
    return at


@pytest.mark.parametrize("size", [0, 10, 2**31, 2**32 - 2])
@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints/final/weights.safetensors"])
def test_wrong_sizes_are_refused(name, size, packed, tmp_path):
    content = bytearray(packed.read_bytes())
    at = directory(bytes(content), name)
    struct.pack_into("<LL", content, at + 20, size, size)
    (tmp_path / "bad.zip").write_bytes(content)
    refused(tmp_path / "bad.zip", tmp_path)


def test_overlapping_members_are_refused(packed, tmp_path):
    """All of them the whole file: larger together than what they lie in."""
    content = bytearray(packed.read_bytes())
    for name in ("tokenizer.source.json", "tokenizer.target.json", "checkpoints/final/weights.safetensors"):
        at = directory(bytes(content), name)
        struct.pack_into("<LL", content, at + 20, len(content) - 100, len(content) - 100)
        struct.pack_into("<L", content, at + 42, 0)
    (tmp_path / "bad.zip").write_bytes(content)
    assert "together are larger" in str(refused(tmp_path / "bad.zip", tmp_path))


def test_encrypted_member_is_refused(packed, tmp_path):
    content = bytearray(packed.read_bytes())
    at = directory(bytes(content), "recipe.yaml")
    content[at + 8] |= 1
    (tmp_path / "bad.zip").write_bytes(content)
    assert "encrypted" in str(refused(tmp_path / "bad.zip", tmp_path))


def test_manifest_that_names_other_files_is_refused(packed, tmp_path):
    with zipfile.ZipFile(packed) as archive:
        manifest = json.loads(archive.read("checkpoints/final/manifest.json"))
    manifest["files"]["/dev/zero"] = {"size": 1, "sha256": ""}
    rewrite(packed, tmp_path / "bad.zip", {"checkpoints/final/manifest.json": json.dumps(manifest).encode()})
    assert "manifest" in str(refused(tmp_path / "bad.zip", tmp_path))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (b"a: &a {x: *a}\n", "refers to itself"),
        (b"[" * 30_000, "levels"),
        (b"training: {steps: 1}\ntraining: {seed: 1}\n", "lines 1 and 2"),
        (b"model: !!python/object/apply:os.system [true]\n", "YAML"),
        (b"model: {encoder: {kind: transformer}\n", "YAML"),
        (b"init: {model: /somewhere}\n", "another run"),
    ],
)
def test_recipe_with_tags_or_other_runs_is_refused(recipe, reason, packed, tmp_path):
    rewrite(packed, tmp_path / "bad.zip", {"recipe.yaml": recipe})
    assert reason in str(refused(tmp_path / "bad.zip", tmp_path))


@pytest.mark.parametrize("content", [b"{", b"[" * 30_000, b"[]", b"\xff"])
def test_damaged_metrics_are_named(content, run, tmp_path):
    copy = Run(tmp_path / "run")
    shutil.copytree(run.folder, copy.folder)
    copy.metrics_file.write_bytes(content)
    with pytest.raises(InputError, match=r"metrics\.json") as caught:
        bundle.pack(copy, tmp_path / "model.zip")
    assert "remove the file" in caught.value.remedy
    assert not (tmp_path / "model.zip").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_truncated_or_changed_bytes_are_refused(packed, tmp_path, data):
    """A bundle that was cut is refused; one with a changed byte is refused, or the byte meant nothing."""
    content = packed.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    bad = tmp_path / "bad.zip"
    bad.write_bytes(content[:at])
    with pytest.raises(InputError):
        transduce.load(bad)
    bad.write_bytes(content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :])
    try:
        weights = transduce.load(bad, device="cpu").network.state_dict()
    except InputError:
        return
    plain = transduce.load(packed, device="cpu").network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.items())
