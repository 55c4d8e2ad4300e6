"""Inspection of data: every kind of suspicious line is found with its number, and clean data has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_fixtures import Command

from transduce.autoconfig.statistics import inspect
from transduce.recipe import parse

CLEAN = [f"Satz Nummer {number} ist hier\tsentence number {number} is here" for number in range(60)]
SUSPICIOUS = {
    "duplicate": CLEAN[0],
    "empty source": "\tb",
    "empty target": "x\t",
    "empty line": "",
    "bad encoding": "GrÃ¤fin\tcountess",
    "copy of the source": "kopie hier\tkopie hier",
    "control character": "a\x07b\tbell",
    "invalid UTF-8": "bad \udcff\tx",
    "length ratio": "kurz\tthis is a very long target for such a short source",
}


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes(b"".join(f"{line}\n".encode("utf-8", "surrogateescape") for line in lines))
    return path


@pytest.mark.parametrize("kind", SUSPICIOUS)
def test_a_suspicious_line_is_found_with_its_number(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a.tsv", [*CLEAN, SUSPICIOUS[kind]])
    (found,) = inspect(parse({"data": {"train": str(path)}}).data).sets.values()
    assert {name: (one.count, [place.line for place in one.places]) for name, one in found.problems.items()} == {
        kind: (1, [61])
    }


def test_clean_data_have_no_suspicious_lines(tmp_path: Path) -> None:
    data = {
        "train": str(write(tmp_path / "a.tsv", CLEAN)),
        "test": str(write(tmp_path / "b.tsv", [*CLEAN[50:], "x\ty"])),
    }
    found = inspect(parse({"data": data}).data)
    assert [one.problems for one in found.sets.values()] == [{}, {}]
    assert (found.overlap["test"].examples, found.overlap["test"].pairs) == (11, 10)
    side = found.sets["train"].source
    assert side is not None
    assert (side.median, side.longest, sum(side.histogram), side.scripts) == (23, 23, 60, {"Latin": 1.0})


def test_scripts_and_missing_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", ["mira\tмира", "oto\t音"])
    side = inspect(parse({"data": {"train": str(path)}}).data).sets["train"].target
    assert side.scripts == {"Cyrillic": 0.8, "Cjk": 0.2}
    pictures = {"train": str(write(tmp_path / "b.tsv", ["none.png\ta cat"])), "sources": {"image": "image"}}
    found = inspect(parse({"data": pictures}).data).sets["train"]
    assert (found.source, [*found.problems]) == (None, ["missing file"])


def test_the_command_says_that_training_stops_at_unreadable_lines(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path / "a.tsv", [*CLEAN, "no tab", "no tab either"])
    called = command("inspect", path)
    assert "stops at the 2 lines that cannot be read" in " ".join(called.out.split())
    assert command("train", path, "--plan").code == 2
    assert "cannot be read" not in command("inspect", write(tmp_path / "b.tsv", CLEAN)).out


def test_the_command_prints_and_writes_what_was_found(tmp_path: Path, command: Command) -> None:
    path = write(tmp_path / "a.tsv", [*CLEAN, *SUSPICIOUS.values(), "<b>&amp;\t<script>"])
    outputs = ("--json", tmp_path / "a.json", "--png", tmp_path / "a.png", "--html", tmp_path / "a.html")
    called = command("inspect", path, f"data.test={path}", *outputs)
    assert called.code == 0, called.err
    for kind in SUSPICIOUS:
        assert f"train, {kind}: 1" in called.out
    assert f"{path}:66" in called.out
    assert "would choose" in called.out
    assert "the recipe:" in called.out
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["sets"]["train"]["problems"]["copy of the source"]["places"][0]["line"] == 66
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert "<script" not in page
    assert "data:image/png;base64," in page
