"""Speculative decoding with a draft run, on the command line and in Python: greedy outputs do not change."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError

LINES = ["red blue green", "blue", "green red", "", "nobody knows this"]


def test_outputs_equal_greedy_search(attention_run: Path, bottleneck_run: Path) -> None:
    model, draft = transduce.load(attention_run), transduce.load(bottleneck_run)
    plain = model.generate(LINES, strategy="greedy")
    for workers in (1, 2):
        found = model.generate(LINES, strategy="greedy", draft=draft, workers=workers)
        assert [one.text for one in found] == [one.text for one in plain]
        assert [one.score for one in found] == pytest.approx([one.score for one in plain], abs=1e-4)


def test_generate_command_with_a_draft(attention_run: Path, bottleneck_run: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    words = ["generate", str(attention_run), str(tmp_path / "lines.txt"), "--set", "strategy=greedy"]
    plain, drafted = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--draft", str(bottleneck_run)]))
    assert drafted.exit_code == plain.exit_code == 0
    assert drafted.stdout == plain.stdout


def test_unsupported_searches_are_refused(attention_run: Path, bottleneck_run: Path, transformer_run: Path) -> None:
    model, draft = transduce.load(attention_run), transduce.load(bottleneck_run)
    with pytest.raises(InputError, match="another vocabulary"):
        model.generate(LINES, draft=transduce.load(transformer_run), strategy="greedy")
    with pytest.raises(InputError, match="greedy"):
        model.generate(LINES, draft=draft, beam=4)
    with pytest.raises(InputError, match="prefix"):
        model.generate(["red"], draft=draft, strategy="greedy", prefixes=["RED"])
