"""A quick run that proposes what a better one says: commands and Python give what they gave without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import transduce
from transduce.cli import app
from transduce.errors import InputError

LINES = ["red blue green", "blue", "green red", "", "nobody knows this"]


def test_the_same_output(attention_run: Path, bottleneck_run: Path) -> None:
    model, draft = transduce.load(attention_run), transduce.load(bottleneck_run)
    plain = model.generate(LINES, strategy="greedy")
    for workers in (1, 2):
        found = model.generate(LINES, strategy="greedy", draft=draft, workers=workers)
        assert [one.text for one in found] == [one.text for one in plain]
        assert [one.score for one in found] == pytest.approx([one.score for one in plain], abs=1e-4)


def test_the_command(attention_run: Path, bottleneck_run: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    words = ["generate", str(attention_run), str(tmp_path / "lines.txt"), "--set", "strategy=greedy"]
    plain, drafted = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--draft", str(bottleneck_run)]))
    assert drafted.exit_code == plain.exit_code == 0
    assert drafted.stdout == plain.stdout


def test_what_it_cannot_serve(attention_run: Path, bottleneck_run: Path, transformer_run: Path) -> None:
    model, draft = transduce.load(attention_run), transduce.load(bottleneck_run)
    with pytest.raises(InputError, match="other tokens"):
        model.generate(LINES, draft=transduce.load(transformer_run), strategy="greedy")
    with pytest.raises(InputError, match="greedy"):
        model.generate(LINES, draft=draft, beam=4)
    with pytest.raises(InputError, match="prefix"):
        model.generate(["red"], draft=draft, strategy="greedy", prefixes=["RED"])
