"""Without a compiler, or without the wish for one, everything goes on as it did; with one, it is compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from transduce.kernels.native import library as libraries
from transduce.kernels.packed_linear import PackedFloat32, PackedInt8

HAS_COMPILER = any(libraries.shutil.which(name) for name in libraries.COMPILERS)


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not asked yet."""
    monkeypatch.setattr(libraries, "_found", libraries.functools.cache(libraries._found.__wrapped__))


@pytest.mark.skipif(not HAS_COMPILER, reason="no compiler here")
def test_a_compiler_is_used_where_there_is_one() -> None:
    found = libraries.library()
    assert found is not None
    assert found.transduce_simd_level() >= 1


@pytest.mark.parametrize("kind", [PackedFloat32, PackedInt8])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, kind: type[PackedFloat32 | PackedInt8]) -> None:
    monkeypatch.setenv(libraries.SWITCH, "0")
    assert libraries.library() is None
    layer, values = nn.Linear(20, 30), torch.randn(4, 20)
    made = kind(layer)
    assert made.native is None
    with torch.inference_mode():
        torch.testing.assert_close(made(values), layer(values), rtol=0.05, atol=0.05)


def test_no_compiler_is_told_once(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="no C compiler"):
        assert libraries.library() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert libraries.library() is None
    assert PackedInt8(nn.Linear(4, 4)).native is None


def test_a_compiler_that_fails_is_told(afresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho out of luck >&2\nexit 1\n', encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries.shutil, "which", lambda name: str(broken))
    with pytest.warns(UserWarning, match="could not compile"):
        assert libraries.library() is None
    assert not list((tmp_path / "transduce" / "native").iterdir())  # nothing is left behind


@pytest.mark.skipif(not HAS_COMPILER, reason="no compiler here")
def test_compiled_once(tmp_path: Path) -> None:
    compiler = next(path for name in libraries.COMPILERS if (path := libraries.shutil.which(name)))
    made = libraries.compiled(compiler, ("-O0",), tmp_path)
    written = made.stat().st_mtime_ns
    assert libraries.compiled(compiler, ("-O0",), tmp_path) == made
    assert made.stat().st_mtime_ns == written
    assert libraries.compiled(compiler, ("-O1",), tmp_path) != made
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_compiled_at_import() -> None:
    code = (
        "import transduce.inference.model, transduce.decoding.search; "
        "import transduce.kernels.native.library as l; print(l.loaded())"
    )
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout.strip(), done.returncode) == ("None", 0), done.stderr


def test_the_source_is_shipped() -> None:
    folder = Path(libraries.__file__).parent
    assert sorted(libraries.SOURCES) == sorted(path.name for path in folder.iterdir() if path.suffix in (".c", ".h"))
