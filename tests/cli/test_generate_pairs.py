"""`transduce generate --pairs`: training pairs for sequence-level distillation."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fixtures import RECURRENT, Command, colour_pairs, settings

import transduce
from transduce.cli.generate_lines import pair_line
from transduce.errors import InputError


def test_a_student_trains_on_the_pairs_of_its_teacher(attention_run: Path, tmp_path: Path, command: Command) -> None:
    sources = [source for source, _ in colour_pairs(120, seed=3)]
    (tmp_path / "sources.txt").write_text("".join(f"{source}\n" for source in sources))
    taught = tmp_path / "taught.tsv"
    called = command("generate", attention_run, tmp_path / "sources.txt", "--pairs", "--output", taught, "--beam", "2")
    assert called.code == 0, called.err
    rows = [line.split("\t") for line in taught.read_text().splitlines()]
    outputs = [one.text for one in transduce.load(attention_run).generate(sources, beam=2)]
    assert rows == [[source, output] for source, output in zip(sources, outputs, strict=True)]
    part = {**RECURRENT, "width": 16}
    student = settings(taught, {"encoder": part, "decoder": {**part, "context": "luong"}}, "words", steps=10)
    trained = transduce.train(student, tmp_path / "student")
    assert trained.outcome.step == 10
    assert trained.outcome.scores["loss"] < 3.0


def test_tabs_in_pairs_are_rejected_with_their_line(attention_run: Path, tmp_path: Path, command: Command) -> None:
    called = command("generate", attention_run, "-", "--pairs", stdin=b"red blue\nred\tblue\n")
    assert (called.code, "-:2: 1 tabs in a source of 1 columns" in called.err) == (2, True)
    assert pair_line("a\tb", "c", 2, "file:1") == "a\tb\tc"
    with pytest.raises(InputError, match=r"file:1: .* a tab"):
        pair_line("a", "b\tc", 1, "file:1")
    with pytest.raises(InputError, match="0 tabs in a source of 2 columns"):
        pair_line("a", "b", 2, "file:1")


def test_an_empty_source_gives_an_empty_pair(attention_run: Path, command: Command) -> None:
    called = command("generate", attention_run, "-", "--pairs", stdin=b"red\n\nblue\n")
    assert called.out.splitlines()[1] == "\t"
    assert len(called.out.splitlines()) == 3


@pytest.mark.parametrize("option", ["--json", "--align"])
def test_pairs_excludes_json_and_align(option: str, attention_run: Path, command: Command) -> None:
    called = command("generate", attention_run, "-", "--pairs", option, stdin=b"red\n")
    assert (called.code, "--pairs" in called.err) == (2, True)
