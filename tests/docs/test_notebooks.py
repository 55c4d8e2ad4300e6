"""The notebooks in examples/: without outputs, short cells, and their code runs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_and_have_no_outputs(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    for source in cells(path, "code"):
        ast.parse(source)
        assert len(source.splitlines()) <= 32
    assert len(cells(path, "markdown")) >= 3
    known = (ROOT / "docs" / "claims").glob("*.md")
    named = set(re.findall(r"transduce claims ([\w-]+)", "".join(cells(path, "markdown"))))
    assert named <= {page.stem for page in known}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSDUCE_TINY", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(compile("\n".join(cells(path, "code")), path.stem, "exec"), {})


def test_the_notebooks_follow_the_course() -> None:
    names = [path.stem.partition("-")[2] for path in NOTEBOOKS]
    assert names == [
        "language-model", "two-networks-and-a-vector", "attention", "self-attention", "transformer", "three-shapes",
        "captions",
    ]  # fmt: skip
