"""Damaged and hostile bundles: an InputError, or a model that generates."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_fixtures import TEXTS, make_run, pair
from fuzzing import Outcome, fuzz, mutate_bytes, mutate_tree

import transduce
from transduce.interop import bundle

FINAL = "checkpoints/final"
MANIFEST, STATE = f"{FINAL}/manifest.json", f"{FINAL}/state.json"
HOSTILE = (b"[" * 30_000, b'{"a":' * 30_000, b"9" * 5000, b"", b"{}", b"[]", b"null", b"\xff\xfe\x00")
SIZES = (10**6, 100_000, 2**20, 4096, 0, -1)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The members of a small bundle by name."""
    folder = tmp_path_factory.mktemp("bundles")
    packed = bundle.pack(make_run(folder / "run", pair()), folder / "model.zip")
    with zipfile.ZipFile(packed) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write(path: Path, members: dict[str, bytes], *, signed: bool) -> None:
    """A bundle of these members. `signed`: the manifest states the hashes of what is there, as a forger would."""
    if signed:
        hashes = {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in members.items()
        }
        files = {name: hashes[f"{FINAL}/{name}"] for name in ("state.json", "weights.safetensors")}
        run = {name: hashes[name] for name in ("recipe.yaml", "tokenizer.source.json", "tokenizer.target.json")}
        try:
            manifest = json.loads(members[MANIFEST])
            members = {**members, MANIFEST: json.dumps({**manifest, "files": files, "run": run}).encode()}
        except (ValueError, TypeError, RecursionError):
            pass  # the manifest itself is damaged
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _resized(draw: random.Random, recipe: bytes) -> bytes:
    """Layers, widths and other sizes that the weights do not have."""
    content: Any = yaml.safe_load(recipe)
    part = content["model"][draw.choice(("encoder", "decoder"))]
    part[draw.choice(("layers", "width", "heads", "ff_width"))] = draw.choice(SIZES)
    return yaml.safe_dump(content, sort_keys=False).encode()


def _damaged(draw: random.Random, name: str, content: bytes) -> bytes:
    kind = draw.random()
    if kind < 0.3 or name.endswith(".safetensors"):
        return mutate_bytes(draw, content)
    if kind < 0.4:
        return draw.choice(HOSTILE)
    if name == "recipe.yaml":
        if kind < 0.7:
            return _resized(draw, content)
        return yaml.safe_dump(mutate_tree(draw, yaml.safe_load(content)), sort_keys=False).encode()
    return json.dumps(mutate_tree(draw, json.loads(content))).encode()


def test_damaged_bundles(members: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "model.zip"

    def attempt(draw: random.Random) -> Outcome:
        name = draw.choice(sorted(members))
        _write(path, {**members, name: _damaged(draw, name, members[name])}, signed=draw.random() < 0.8)
        if draw.random() < 0.1:
            path.write_bytes(mutate_bytes(draw, path.read_bytes()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transduce.load(path, device="cpu").generate(TEXTS[:2], max_length=4)
        return "accepted"

    fuzz("bundles", "members and bytes of bundles, with forged hashes", attempt, cases=60)
